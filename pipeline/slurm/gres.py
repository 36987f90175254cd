"""What sinfo says of a node's GPUs: `gpu:h100:8(S:0-1),shard:16`."""

from __future__ import annotations

import re
from typing import NamedTuple

from pipeline.errors import UserError
from pipeline.slurm.node_lists import expand_node_list

NAME_WIDTH = 20  # `%20N` cuts longer names off
ITEM = re.compile(r"gpu(?::(?P<kind>[A-Za-z][\w.-]*))?(?::(?P<count>[0-9]+))?")


class Gpus(NamedTuple):
    """GPUs of one type on a node; `kind` is empty where Slurm knows no types."""

    kind: str
    number: int


def gpus_in(gres: str) -> list[Gpus]:
    """List a node's GPUs by type; other resources are left out."""
    found = []
    for item in re.sub(r"\([^)]*\)", "", gres).split(","):
        match = ITEM.fullmatch(item.strip())
        if match:
            found.append(Gpus(match["kind"] or "", int(match["count"] or 1)))
    return found


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
