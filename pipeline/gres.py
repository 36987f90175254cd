"""What sinfo says of a node's GPUs: `gpu:h100:8(S:0-1),shard:16`."""

from __future__ import annotations

import re
from typing import NamedTuple

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
