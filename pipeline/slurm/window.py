"""The holes of the schedule, and which sizes of Jobs fit into them: pure functions on what Slurm's commands print.

A hole is what is idle on a node until the planned start of the next pending Job there, or until a reservation begins.
Slurm's backfill starts a Job of low priority in it if its time limit ends before.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.errors import UserError
from pipeline.slurm.gres import gpus_in
from pipeline.slurm.jobs import fields_of
from pipeline.slurm.node_lists import expand_node_list

USABLE = frozenset({"idle", "mixed", "planned"})
UNSEEN_SECONDS = 1800.0  # taken for a hole whose end is not known: other users' Jobs may be hidden
MARGIN_SECONDS = 30.0  # from looking at a hole until a Job can have started in it
STARTUPS = 5  # the shortest Job is worth that many start-ups


@dataclass(frozen=True)
class Node:
    """What is free on a node."""

    name: str
    gpus: int
    cpus: int
    partitions: frozenset[str]


@dataclass(frozen=True)
class Claim:
    """From when on nodes are spoken for, by a pending Job or a reservation; `nodes` None: any of them may be."""

    by: str
    start: float  # unix s
    nodes: frozenset[str] | None


@dataclass(frozen=True)
class Hole:
    """Idle GPUs and CPUs of a node, for `seconds` from now on; None: nothing is planned there that can be seen."""

    node: str
    gpus: int
    cpus: int
    seconds: float | None
    until: str  # what ends it

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Need:
    """What is to be done: seconds of Units, seconds of start-up of a Job, its share of a node, and the limits."""

    seconds: float
    startup: float
    gpus: int
    cpus: int
    longest: float  # seconds that one Job may ask for
    jobs: int  # that may be submitted


@dataclass(frozen=True)
class Size:
    """The limits of one Job, in minutes, and the hole that they come from."""

    minutes: int
    least: int
    why: str

    def flags(self) -> dict[str, str]:
        return {"time": str(self.minutes), "time-min": str(self.least)}

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def nodes_from(text: str) -> list[Node]:
    """Read `sinfo -h -N -O NODE_COLUMNS`: nodes that take Jobs now, with what is free on them."""
    found: dict[str, Node] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) < 6 or cells[1].lower() not in USABLE:  # a star, drain, reserved, …: no Job starts there
            continue
        name, _, cpus, gres, used, partition = cells[:6]
        idle = cpus.split("/")[1:2]
        here = frozenset({partition.rstrip("*")}) | (found[name].partitions if name in found else frozenset())
        free = max(0, _number_of_gpus(gres) - _number_of_gpus(used))
        found[name] = Node(name, free, int(idle[0]) if idle and idle[0].isdecimal() else 0, here)
    return list(found.values())


def _number_of_gpus(gres: str) -> int:
    return sum(gpus.number for gpus in gpus_in(gres))


def planned_from(text: str, ours: Iterable[str] = ()) -> list[Claim]:
    """Read `squeue -h --states=PENDING -O PLANNED_COLUMNS`: Jobs that have a planned start, without `ours`.

    Slurm names the nodes of those that its backfill has planned. Where it names none at all, as old versions do, a Job
    that waits for its turn may come to stand on any node.
    """
    own, rows = set(ours), []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) < 4 or cells[0] in own or (start := unix_time(cells[1])) is None:
            continue
        rows.append((cells[0], start, _node_set(cells[2]), cells[3].strip("()")))
    named = any(nodes for _, _, nodes, _ in rows)
    return [
        Claim(f"job {job}", start, nodes or None)
        for job, start, nodes, reason in rows
        if nodes != frozenset() or (not named and reason not in ("BeginTime", "Dependency"))
    ]


def reservations_from(text: str) -> list[Claim]:
    """Read `scontrol -o show reservation`."""
    claims = []
    for line in text.splitlines():
        fields = fields_of(line)
        start = unix_time(fields.get("StartTime", ""))
        if fields.get("ReservationName") and start is not None:
            claims.append(Claim(f"reservation {fields['ReservationName']}", start, _node_set(fields.get("Nodes", ""))))
    return claims


def _node_set(text: str) -> frozenset[str] | None:
    """Return the nodes of a list; None where it cannot be read, and may mean any."""
    if text in ("", "(null)", "N/A"):
        return frozenset()
    try:
        return frozenset(expand_node_list(text))
    except UserError:
        return None


def unix_time(text: str) -> float | None:
    """Read Slurm's local time, `2026-11-30T11:20:26`; None for N/A and the like."""
    try:
        return time.mktime(time.strptime(text.strip(), "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):
        return None


def find_holes(now: float, nodes: Sequence[Node], claims: Sequence[Claim], partition: str | None = None) -> list[Hole]:
    """Return what is idle on each node, and for how long; the longest hole first."""
    holes = []
    for node in nodes:
        if (partition and not node.partitions & set(partition.split(","))) or not (node.gpus or node.cpus):
            continue
        ahead = [claim for claim in claims if claim.nodes is None or node.name in claim.nodes]
        first = min(ahead, key=lambda claim: claim.start, default=None)
        seconds = None if first is None else max(0.0, first.start - now)
        holes.append(Hole(node.name, node.gpus, node.cpus, seconds, first.by if first else "nothing that can be seen"))
    return sorted(holes, key=lambda hole: (-(math.inf if hole.seconds is None else hole.seconds), hole.node))


def choose_sizes(holes: Sequence[Hole], need: Need) -> list[Size]:
    """Choose the Jobs that do what is needed, the longest holes first; one of modest size where there is no hole.

    A Job asks for the hole, and as its least for half of that and five start-ups: Slurm may grant the least.
    """
    shortest = max(60.0, STARTUPS * need.startup)
    slots: list[tuple[float, str]] = []
    for hole in holes:
        room = min(need.longest, (UNSEEN_SECONDS if hole.seconds is None else hole.seconds) - MARGIN_SECONDS)
        if room < shortest:
            continue
        fitting = hole.gpus // need.gpus if need.gpus else hole.cpus // max(1, need.cpus)
        told = f"{hole.node} is idle until {hole.until}"
        slots += [(room, f"{told} in {hole.seconds:.0f} s" if hole.seconds is not None else told)] * fitting
    if not slots and need.seconds > 0:
        slots = [(min(need.longest, UNSEEN_SECONDS), "no hole now: for the next one")]
    sizes, left = [], need.seconds
    for room, why in slots[: need.jobs]:
        if left <= 0:
            break
        minutes = max(1, min(int(room // 60), math.ceil(max(shortest, left + 2 * need.startup) / 60)))
        least = min(minutes, math.ceil(max(minutes / 2, shortest / 60)))
        sizes.append(Size(minutes, least, why))
        left -= minutes * 60 - need.startup
    return sizes
