"""What an attempt is told of its allocation: attempts/JOB.N/allocation.env, which sbatch/lib.sh sources."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Mapping
from pathlib import Path

from pipeline.errors import UserError
from pipeline.files import atomic_path
from pipeline.slurm.commands import Slurm
from pipeline.slurm.errors import SlurmError
from pipeline.slurm.node_lists import expand_node_list


def nodes_of(environ: Mapping[str, str]) -> list[str]:
    """Return the nodes of the Job that `environ` belongs to, in Slurm's order; this one alone where that is unknown."""
    try:
        return expand_node_list(environ.get("SLURM_JOB_NODELIST", ""))
    except UserError:
        return [environ.get("SLURMD_NODENAME") or socket.gethostname()]


def allocation_text(nodes: list[str]) -> str:
    """Write what the batch shell has to know, as bash assignments."""
    return f"PIPELINE_NODES={shlex.quote(','.join(nodes))}\n"


def write_allocation(env: Path, sinfo: Path, environ: Mapping[str, str], slurm: Slurm | None) -> None:
    """Write both files of an attempt. `slurm` only where nodes may call its commands: preflight can do without."""
    env.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(env, durable=False) as temporary:
        temporary.write_text(allocation_text(nodes_of(environ)), encoding="utf-8")
    if slurm is None:
        return
    try:
        sinfo.write_text(slurm.registered(environ.get("SLURM_JOB_NODELIST", "")), encoding="utf-8")
    except SlurmError:  # the controller is away; the nodes tell of themselves
        return
