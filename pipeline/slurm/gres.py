"""GPUs as Slurm writes them: `gpu:h100:8(S:0-1),shard:16`.

An item is `name[:type][:no_consume][:count]` (gres.conf); a type may begin with a digit, as 2080ti and 1g.10gb do, or
be a number, as 3090 is. So the last part is the count where it is a number, and what stands before it the type.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from pipeline.errors import UserError
from pipeline.slurm.node_lists import expand_node_list

NAME_WIDTH = 20  # `%20N` cuts longer names off
COUNT = re.compile(r"([0-9]+)([kmgtp]?)", re.I)
ASIDE = re.compile(r"\([^)]*\)")  # (S:0-1), (IDX:0,3), and (null) for a type that there is not


class Gpus(NamedTuple):
    """GPUs of one type on a node; `kind` is empty where Slurm knows no types."""

    kind: str
    number: int


def gpus_in(gres: str) -> list[Gpus]:
    """List a node's GPUs by type; other resources are left out."""
    parts = (item.strip().removeprefix("gres:").split(":") for item in ASIDE.sub("", gres).split(","))
    return [_gpus(rest) for name, *rest in parts if name == "gpu"]


def _gpus(parts: list[str]) -> Gpus:
    """Read what follows `gpu`: a type, a count, both or neither."""
    count = COUNT.fullmatch(parts[-1]) if parts else None
    kinds = [part for part in (parts[:-1] if count else parts) if part != "no_consume"]
    number = int(count[1]) * 1024 ** " kmgtp".index(count[2].lower() or " ") if count else 1
    return Gpus(kinds[0] if kinds else "", number)


def registered_gres(text: str, nodes: list[str]) -> dict[str, str]:
    """Return the GRES of each of `nodes` from the text of `sinfo -o "%20N %10c %10m %25f %G"`."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) < 5 or words[0] == "NODELIST":
            continue
        names = set(_names(words[0]))
        for node in nodes:
            if node in names or (len(words[0]) == NAME_WIDTH and "[" not in words[0] and node.startswith(words[0])):
                found.setdefault(node, words[-1])
    return found


def _names(text: str) -> list[str]:
    try:
        return expand_node_list(text)
    except UserError:  # cut off in the middle of a bracket
        return []
