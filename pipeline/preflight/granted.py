"""What Slurm has granted the Job on a node, and how much of it the processes of a step may use there."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel

COUNT = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")  # SLURM_JOB_CPUS_PER_NODE: 8(x2),4
UNLIMITED = 1 << 60  # bytes; the kernel writes "none" as a number above that in cgroups of version 1
MIB = 1 << 20


class Granted(BaseModel):
    """CPUs and bytes of the Job on one node; None where Slurm does not say, or gives whatever there is."""

    cpus: int | None = None
    memory: int | None = None
    limit: int | None = None  # bytes that this very step may use


def granted(environ: Mapping[str, str], number: int | None, root: Path, present: int | None = None) -> Granted:
    """Read it on the node that is the Job's `number`-th, of the environment and the cgroup of this process.

    `present`: CPUs of the machine; a site may let Slurm give more.
    """
    cpus = job_cpus(environ.get("SLURM_JOB_CPUS_PER_NODE", ""), number)
    whole, each = (_number(environ.get(name)) for name in ("SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU"))
    memory = whole or (each * cpus if each and cpus else None)
    cpus = min(cpus, present) if cpus and present else cpus
    return Granted(cpus=cpus, memory=memory * MIB if memory else None, limit=memory_limit(root))


def job_cpus(text: str, number: int | None) -> int | None:
    """Return the CPUs of a Job on its `number`-th node; None where the text does not say."""
    if number is None:
        return None
    for item in text.split(","):
        found = COUNT.fullmatch(item)
        if found is None:
            return None
        number -= int(found[2] or 1)
        if number < 0:
            return int(found[1])
    return None


def memory_limit(root: Path) -> int | None:
    """Return the least limit of this process's cgroup and those around it; None without one."""
    found = []
    for controllers, path in _cgroups(root):
        place, name = ("memory", "memory.limit_in_bytes") if controllers else ("", "memory.max")
        base = root / "sys/fs/cgroup" / place
        folder = base / path.lstrip("/")
        while folder.is_relative_to(base):
            value = _number(_text(folder / name))
            if value is not None and value < UNLIMITED:
                found.append(value)
            if folder == base:
                break
            folder = folder.parent
    return min(found, default=None)


def affinity() -> str:
    """Return the CPUs that this process may run on, as a mask in hexadecimal digits."""
    return f"{sum(1 << cpu for cpu in os.sched_getaffinity(0)):x}"


def _cgroups(root: Path) -> list[tuple[str, str]]:
    """List the hierarchies that may limit memory: version 2 has no name, version 1 is called memory."""
    lines = [line.split(":", 2) for line in _text(root / "proc/self/cgroup").splitlines()]
    named = [(line[1], line[2]) for line in lines if len(line) == 3]
    return [(names, path) for names, path in named if not names or "memory" in names.split(",")]


def _number(text: str | None) -> int | None:
    return int(text) if text and text.strip().isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
