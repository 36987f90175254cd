"""Where a Run happens: this machine, and what its processes find there."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from typing import Literal

from pipeline.errors import UserError

PING_SECONDS = 3


@dataclass(frozen=True)
class Cluster:
    """A place to run Jobs. `python` is the absolute interpreter that the stages run with."""

    scheduler: Literal["local"]
    python: str
    cores: int


def slurm_answers() -> bool:
    """Tell whether a Slurm controller answers `scontrol ping` from here within 3 seconds."""
    if shutil.which("scontrol") is None:
        return False
    try:
        ping = subprocess.run(["scontrol", "ping"], capture_output=True, text=True, timeout=PING_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return ping.returncode == 0 and " is UP" in ping.stdout


def open_cluster(name: str | None, python: str) -> Cluster:
    """Return the cluster that `--cluster` names; without a name this machine, unless a Slurm answers here."""
    if name is None and slurm_answers():
        raise UserError(
            "a Slurm controller answers on this machine, and training on its login node is seldom what people want.\n"
            "This version runs on one machine only. To run right here all the same, add: --cluster local"
        )
    if name not in (None, "local"):
        raise UserError(f"--cluster {name}: this version knows only one place, this machine: --cluster local")
    return Cluster("local", python, len(os.sched_getaffinity(0)))
