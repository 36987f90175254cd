"""What can go wrong with Slurm's commands, and what to do then."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import NamedTuple

from pipeline.errors import EXIT_USAGE, NotReadyError

LOGIN_HINT = "load Slurm's commands (often: module load slurm), or write login in the cluster file"

# The texts of Slurm 20.11 to 26.05 by which it refuses a request for what stands in it. Every other text may pass: full
# queues, credentials that expired, what a site's plugin says, what a later Slurm will say.
ABOUT_THE_REQUEST = (
    "Invalid partition name|No partition specified|User's group not permitted|Requested nodes not in this partition|"
    "More processors requested than permitted|(Node|CPU|Task) count specification invalid|Task distribution|"
    "Job size specification|Pathname of a file|Requested node configuration is not available|"
    "Requested partition configuration not available|Invalid node name|Invalid (preferred )?feature|"
    "Invalid account|Invalid (qos|wckey|license|generic resource|GRES|"
    "Trackable|job array|time-min|--nice|mcs_label|container id)|Invalid time specified|Duplicate generic resource|"
    "Insufficient GRES|Job dependency problem|Circular job dependency|Memory required by task is not available|"
    "Requested time limit is invalid|Time limit specification required|Access denied to requested reservation|"
    "Requested reservation is invalid|Access/permission denied|Job --batch option|Multiple partition job request|"
    "Job cannot be submitted without|Job script not specified|Burst Buffer (permission|request)|"
    "Required node not available"
)
# What sbatch finds by itself, before it asks the controller.
ABOUT_ITS_WORDS = (
    r"(error: |fatal: )?(unrecognized|invalid|ambiguous|option|Invalid (--|-W|directive|\S+ specification$)|"
    r"Unable to open file|Cannot stat|Script|Batch script|This does not look like|\"\S*\" is not a valid node count|"
    r"Maximum node count|Incompatible begin and deadline)"
)
FINAL = re.compile(
    rf"^allocation failure|^sbatch: {ABOUT_ITS_WORDS}|^s(batch|control|cancel): (error|fatal): .*({ABOUT_THE_REQUEST})",
    re.M,
)
LIMITED = re.compile(r"violates accounting/QOS policy")
LIMIT_NAME = re.compile(r"\b((?:QOS|Assoc|Max|Grp)[A-Za-z]+)")
NO_ANSWER = re.compile(
    r"[Ss]ocket timed out|[Uu]nable to contact|[Cc]onnection (refused|reset|closed|timed out)|Zero Bytes|"
    r"[Tt]ransport endpoint|temporarily (unavailable|unable)|[Cc]ommunication (connection )?failure|No route to host|"
    r"[Uu]nable to establish|backup controller|Slurmctld.*(down|DOWN)|Broken pipe"
)
REMEDIES = [
    (NO_ANSWER, "the controller does not answer; try again in a minute, and ask it: scontrol ping"),
    (
        re.compile(r"[Mm]unge|[Aa]uthentication|credential|[Pp]rotocol"),
        "check that munge runs here and that the clocks agree, or renew the token in SLURM_JWT",
    ),
    (re.compile(r"queue full|MaxJobCount"), "the cluster's queue is full; try again when it is shorter"),
    (LIMITED, "a limit of the account or QOS is in the way: ask for less, or mend qos or account below sbatch"),
    (re.compile(r"[Pp]artition"), "see `sinfo -s`, and mend partition below sbatch"),
    (
        re.compile(r"[Aa]ccount|[Aa]ssociation"),
        "see `sacctmgr show associations user=$USER`, and mend account below sbatch",
    ),
    (re.compile(r"[Qq][Oo][Ss]|[Qq]uality"), "see `sacctmgr show qos`, and mend qos below sbatch"),
    (re.compile(r"generic resource|GRES|gres"), "see `sinfo -o '%P %G'`, and mend gpus_per_node, gpu_type or gpu_flag"),
    (
        re.compile(r"node configuration|[Mm]emory|--mem"),
        "no node has that much; see `sinfo -o '%P %c %m %G'`, ask for less",
    ),
    (re.compile(r"unrecognized option|invalid option"), "mend the option below sbatch; see `sbatch --help`"),
    (re.compile(r"[Tt]ime limit"), "see the limit in `sinfo -o '%P %l'`, and lower the stage's time"),
    (re.compile(r"array"), "the array is too large; see MaxArraySize in `scontrol show config`"),
]


LONGEST = 4000  # characters of what a command said: a page of some proxy is not for a person


def _shown(words: Sequence[str]) -> str:
    """Write a command for a person: a list of a thousand nodes is cut, and no separator is left that cannot be seen."""
    short = (word if len(word) <= 400 else f"{word[:400]}…" for word in words)
    return "".join(letter if letter.isprintable() else "?" for letter in shlex.join(short))


class SlurmError(NotReadyError):
    """A command of Slurm's is missing, hangs or fails. `answer` is what it said."""

    def __init__(self, words: Sequence[str], answer: str, remedy: str = "") -> None:
        self.words, self.answer = list(words), answer.strip()
        remedy = remedy or next((text for pattern, text in REMEDIES if pattern.search(answer)), "")
        said = self.answer or "it said nothing"
        super().__init__(f"{_shown(words)}\n{said[:LONGEST]}" + (f"\nWhat to do: {remedy}" if remedy else ""))


class SlurmRefused(SlurmError):
    """Slurm does not take the request as it is: asking again is no use."""

    exit_code = EXIT_USAGE


class SlurmFull(SlurmError):
    """A limit on how many Jobs may be queued is reached. Nothing was submitted; it passes when others have ended."""

    def __init__(self, words: Sequence[str], answer: str) -> None:
        super().__init__(words, answer, "a limit on how many Jobs may be queued is reached: wait, or cancel others")


class Answer(NamedTuple):
    """What a command said. `code` is None where it hung and was ended."""

    code: int | None
    output: str
    talk: str


def said_by(answer: Answer) -> str:
    """Return all that a command said."""
    said = "\n".join(text.strip() for text in (answer.talk, answer.output) if text.strip())
    return said or f"it ended with exit code {answer.code} and said nothing"


def is_refusal(answer: Answer) -> bool:
    """Tell whether Slurm looked at the request and does not take it, from what may pass by itself."""
    if not answer.code or NO_ANSWER.search(answer.talk):
        return False
    return bool(FINAL.search(answer.talk) or (LIMITED.search(answer.talk) and not is_full(answer)))


def is_full(answer: Answer) -> bool:
    """Tell whether a limit on how many Jobs may be queued is in the way, and not one on what one Job asks for."""
    if not answer.code or not LIMITED.search(answer.talk):
        return False
    limits = LIMIT_NAME.findall(answer.talk)
    return not limits or any("Submit" in limit for limit in limits)
