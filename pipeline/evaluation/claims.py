"""Who works on a Unit: claims made by link(), and who may be followed because it is dead.

Under Slurm the host says who is dead, once, when an attempt begins: it has asked Slurm about every claim that is there.
Elsewhere a claim names its process, and one that is gone is dead.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.run.owner import claim_numbers, claim_path, current, is_alive, is_mine, link_claim, this_process


@dataclass(frozen=True)
class Claimant:
    """An attempt that takes Units. `dead` names attempts as JOB.ATTEMPT; None: the processes themselves are asked."""

    job_id: str
    attempt: int
    dead: frozenset[str] | None = None

    def may_follow(self, holder: dict[str, Any]) -> bool:
        """Tell whether a Unit that `holder` has claimed is free for this attempt."""
        if is_mine(holder, os.getpid()):
            return True
        job_id, attempt = str(holder.get("job_id")), int(holder.get("attempt") or 0)
        if job_id == self.job_id and attempt < self.attempt:
            return True  # one attempt of a Job at a time
        return not is_alive(holder) if self.dead is None else f"{job_id}.{attempt}" in self.dead

    def give_back(self, path: Path) -> None:
        """Take this process's claim of `path` away, where no other one has followed it."""
        _, holder = current(path)
        if holder is not None and is_mine(holder, os.getpid()):
            release(path)

    def claim(self, path: Path) -> bool:
        """Claim `path` if it is free; of several that try at once, one succeeds."""
        number, holder = current(path)
        if holder is not None and not self.may_follow(holder):
            return False
        mine = this_process() | {"job_id": self.job_id, "attempt": self.attempt, "token": secrets.token_hex(8)}
        return link_claim(path, number + 1, mine)


def release(path: Path) -> None:
    """Take all claims of `path` away: its result is there."""
    for number in claim_numbers(path):
        claim_path(path, number).unlink(missing_ok=True)


def holders(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Return who holds claims of `paths`."""
    return [holder for path in paths if (holder := current(path)[1]) is not None]
