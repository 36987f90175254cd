"""When two attempts failed of the same cause: a key made of verdict and reason, without what changes by chance.

Hosts, ranks, numbers, addresses, times and temporary paths differ between two failures of one fault. The key leaves
them out. So it may take two alike faults for one (two error numbers), which ends a chain early, but not one for two.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from pipeline.run.verdict import ENVIRONMENT, HANG, LOST, OUT_OF_MEMORY, STOPPED

# Their reason tells where and when it happened, not what: hang names the rank that was last, lost the nodes.
WITHOUT_WORDS = (STOPPED, LOST, HANG, OUT_OF_MEMORY)
LONGEST = 2000  # characters of a reason that are looked at
CLAUSE = 80  # characters of a clause that count: reasons are cut, and a longer host name moves the cut
CLAUSES = 8

# A failure in these words may be a machine's or the network's: two of them in a row may still be chance.
MACHINE = re.compile(
    r"uncorrect(?:ed|able)|\becc error|\bxid\b|fallen off the bus|gpu is lost|nvlink|hardware (?:error|slowdown)"
    r"|is gone: it was killed|killed \(sigkill\)|watchdog caught collective|remote process exited"
    r"|connection (?:was )?(?:reset|closed)|broken pipe|no tcp connection|stale file handle|input/output error"
    r"|did not (?:arrive|hear)",
    re.I,
)
# Services that others keep busy or restart; the pause between attempts is what helps.
BUSY = "is busy or out of order for now"  # of a registry, in image/container_errors.py

MONTH = "(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*"
UNIT = r"[kmgtp]?i?b(?:ytes?)?(?:/s)?|[mun\u00b5]?s|min(?:utes?)?|sec(?:onds?)?|h(?:ours?)?|days?|%|am|pm|utc"


def _chance(word: re.Match[str]) -> str:
    """Replace a word with a digit in it: numbers, hosts, pids, addresses, hashes. Of a path only that part."""
    return "#" if any(letter.isdigit() for letter in word[0]) or TEMPORARY_NAME.search(word[0]) else word[0]


TEMPORARY_NAME = re.compile(r"(?:^|[._-])(?:tmp|temp(?![a-z]))")  # tmpab_cde of Python's tempfile, step-4.tmp
# What changes by chance -> what stands for it; in this order, on lower-case text.
OFTEN: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile(r"\x1b(?:\[[0-9;?]*[a-z]|[^\[])"), ""),
    # where temporary files lie, whatever they are called
    (re.compile(r"(?:/(?:tmp|var/tmp|dev/shm|run|var/run|proc)\b|\$tmpdir\b)[^\s'\"`:;,()\[\]{}<>]*"), "#"),
    (re.compile(r"\b(?:mon|tue|wed|thu|fri|sat|sun)[a-z]*,?(?=\s+(?:\w{3}\s+)?\d)"), "#"),
    (re.compile(rf"\b{MONTH}(?=[\s,-]+\d)|(?<=\d[\s-]){MONTH}\b"), "#"),
    (re.compile(r"(?<![\w:])(?:[0-9a-f]{0,4}:){2,7}[0-9a-f]{0,4}(?:%\w+)?(?![\w:])"), "#"),  # IPv6
    (re.compile(r"\b[a-f]{8,}\b"), "#"),
    (re.compile(r"[^\s/,;:=()\[\]{}<>'\"`|]+"), _chance),
    (re.compile(r"#(?:[:/.,+-]#)+"), "#"),  # 12:03:44, 1/8
    (re.compile(rf"#\s*(?:{UNIT})(?![\w#])"), "#"),
    (re.compile(r"\b(rank|node|gpu|process|step|worker|task|host|nodename)s\b"), r"\1"),
    (re.compile(r"#(?:(?:\s*,\s*|\s+and\s+|\s+)#)+"), "#"),  # a list of them
    (re.compile(r"#(?: and)?(?: #)? more\b"), "#"),
    (re.compile(r"\s+"), " "),
)  # fmt: skip
PLACE = re.compile(r"^(?:(?:all |the )?# node|\[?(?:rank|node|task|worker|process|gpu|host)? ?#\]?(?: on #)?)\s*:\s*")


def cause_of(verdict: str, reason: str, nodes: Sequence[str] = ()) -> str:
    """Return the key of a cause; the same key means the same cause. `nodes`: names that may stand in the reason."""
    if verdict in WITHOUT_WORDS:
        return verdict
    return f"{verdict}: {plain_words(reason, nodes)}"


def plain_words(reason: str, nodes: Sequence[str] = ()) -> str:
    """Return a reason without what changes by chance, each of its clauses once."""
    text = _without_names(reason[:LONGEST].lower(), nodes)
    clauses = {plain for clause in re.split(r"[;\n\r]+", text) if (plain := _plain(clause))}
    return "; ".join(sorted(clauses)[:CLAUSES])


def _without_names(text: str, nodes: Sequence[str]) -> str:
    """Replace the nodes' names, with the rest of a full one (n1.site.org); a name may have no digit to know it by."""
    names = sorted({name.lower() for name in nodes if name}, key=len, reverse=True)
    if not names:
        return text
    return re.sub(rf"(?<![\w.-])(?:{'|'.join(map(re.escape, names))})(?:\.[\w-]+)*(?![\w-])", "0", text)


def _plain(clause: str) -> str:
    for pattern, instead in OFTEN:
        clause = pattern.sub(instead, clause)
    clause = clause.strip()
    while match := PLACE.match(clause):
        clause = clause[match.end() :]
    return clause[:CLAUSE].strip(" .,#:")


def may_be_a_machine(verdict: str, reason: str) -> bool:
    """Tell whether a machine or the network may be behind it, though no node could be blamed."""
    return verdict == HANG or bool(MACHINE.search(reason[:LONGEST]))


def is_temporary(verdict: str, reason: str) -> bool:
    """Tell whether time heals it: a node that was lost to Slurm, a registry that is busy."""
    return verdict == LOST or (verdict == ENVIRONMENT and BUSY in reason[:LONGEST])
