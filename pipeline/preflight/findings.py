"""What preflight finds out about nodes, what it makes of it, and how it says so. Rules: rules.py and
merge.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ValidationError

from pipeline.config.preflight import PreflightConfig
from pipeline.files import read_json
from pipeline.preflight.granted import Granted
from pipeline.preflight.nvidia_smi import Smi
from pipeline.run.blame import Fault, blamed_nodes
from pipeline.run.folder import Run
from pipeline.run.records import read_record
from pipeline.units import size

TO_RANK_0 = ("mount", "route")  # kinds of fault that lie between a node and that of rank 0
VARIABLES = ("NCCL_", "UCX_", "GLOO_", "TORCH_", "FI_")  # what is compared between ranks, listed or not


class Master(BaseModel):
    """A node's attempt to reach rank 0 at MASTER_ADDR:MASTER_PORT."""

    name: str
    port: int
    addresses: list[str] = []
    loopback: bool = False
    seconds: float = 0.0
    errno: int | None = None
    error: str = ""


class IbDevice(BaseModel):
    """An InfiniBand device that the container sees; active if one of its ports is."""

    name: str
    active: bool


class NodeRecord(BaseModel):
    """What one node says about itself, in a file that it writes again at each step: `doing` is the last one."""

    node: str
    rank: int
    pid: int
    launcher: int = 0  # pid of its torchrun; 0 without one
    started: str = ""  # when the job script started: tells this attempt's records from older ones
    doing: str = "arrived"
    ready: bool = False  # all that it can find out alone is found out
    error: str = ""
    contained: bool | None = None  # whether it runs in the image; None where it is to run in none
    boot_id: str = ""  # the same on two nodes: both are this one machine
    load: float | None = None
    cores: int | None = None
    granted: Granted = Granted()
    memlock: int | None = None  # bytes; None: unlimited
    shm_free: int | None = None
    free_bytes: int | None = None
    ib_devices: list[IbDevice] = []
    uverbs: bool = False  # /dev/infiniband/uverbs* is in the container
    smi: Smi | None = None
    torch: str = ""  # its version
    cuda_build: bool | None = None  # whether torch is built for GPUs
    cuda: bool | None = None
    gpus: list[str] = []  # names, as torch sees them
    gpu_uuids: list[str] = []
    sees_token: bool | None = None  # the file of rank 0, in the Run's folder
    variables: dict[str, str] = {}
    is_seen: bool = True  # rank 0 sees its file; rank 0 fills this in
    master: Master | None = None
    skew: float | None = None  # seconds by which its clock is ahead of rank 0's
    file_skew: float | None = None  # seconds by which its clock is ahead of that of the Run's file system
    local_gbps: float | None = None


class RankRecord(BaseModel):
    """What one rank was given by its launcher."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node: str
    pid: int
    launcher: int = 0
    device: str
    cpus: str = ""  # that it may run on: a mask in hexadecimal digits
    variables: dict[str, str] = {}

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.node}"


class AllReduce(BaseModel):
    """The timed all-reduce over all ranks; GB are 10^9 bytes."""

    backend: str
    bytes: int
    seconds: float
    bus_gbps: float


@dataclass(frozen=True)
class Wanted:
    """What the nodes are measured against."""

    limits: PreflightConfig
    nproc_per_node: int
    free_bytes: int  # that the Run's folder must have
    world_size: int = 1
    nodes: list[str] = field(default_factory=list)  # expected; empty: not known
    gpus_per_node: int = 0  # requested
    gres: dict[str, str] = field(default_factory=dict)  # node -> what Slurm has registered
    variables: dict[str, str] = field(default_factory=dict)  # that the launch file exports


@dataclass(frozen=True)
class Finding:
    """Something wrong: where, what, and what to do. Without a node it is nobody's fault, or everybody's."""

    level: Literal["error", "warning"]
    node: str | None
    cause: str
    remedy: str
    kind: str = ""  # of blame.KINDS: what a node may be blamed for, if others do not have it

    def __str__(self) -> str:
        place = f"{self.node}: " if self.node else ""
        return f"{place}{self.cause}; {self.remedy}" if self.remedy else f"{place}{self.cause}"


@dataclass(frozen=True)
class Report:
    """The end of a preflight."""

    nodes: list[NodeRecord]
    ranks: list[RankRecord]
    findings: list[Finding]
    all_reduce: AllReduce | None = None

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.level == "error"]

    @property
    def bad_nodes(self) -> list[str]:
        """Name the nodes that are to blame, once each, because others of this attempt are fine."""
        faults = [Fault(finding.node, finding.kind) for finding in self.errors if finding.node]
        everyone = {node.node for node in self.nodes}
        # Rank 0's node always sees its own file and port: it says nothing about the ways to it.
        others = everyone - {node.node for node in self.nodes if node.rank == 0}
        to_rank_0 = [fault for fault in faults if fault.kind in TO_RANK_0]
        own = [fault for fault in faults if fault.kind not in TO_RANK_0]
        return list(dict.fromkeys(blamed_nodes(own, everyone) + blamed_nodes(to_rank_0, others)))

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": not self.errors,
            "bad_nodes": self.bad_nodes,
            "findings": [
                {"level": f.level, "node": f.node, "cause": f.cause, "remedy": f.remedy, "kind": f.kind}
                for f in self.findings
            ],
            "all_reduce": self.all_reduce.model_dump() if self.all_reduce else None,
            "nodes": [record.model_dump() for record in self.nodes],
            "ranks": [record.model_dump() for record in self.ranks],
        }


def merge(findings: Iterable[Finding], nodes: int) -> list[Finding]:
    """Say once what is so on all of two or more nodes, and blame none of them for it; errors come first."""
    by_cause: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in findings:
        by_cause.setdefault((finding.level, finding.cause, finding.remedy), []).append(finding)
    merged: list[Finding] = []
    for same in by_cause.values():
        first, places = same[0], {finding.node for finding in same if finding.node}
        if nodes > 1 and len(places) == nodes:
            merged.append(Finding(first.level, None, f"all {nodes} nodes: {first.cause}", first.remedy))
        else:
            merged += same
    return sorted(merged, key=lambda finding: finding.level)


Model = TypeVar("Model", bound=BaseModel)


def read_valid_records(folder: Path, model: type[Model], keep: Callable[[Model], bool]) -> list[Model]:
    """Read the records in a folder; what is being written, torn or of another kind is left out."""
    records = []
    for path in sorted(folder.glob("*.json")):
        try:
            record = model.model_validate(read_json(path))
        except (OSError, ValueError, ValidationError):
            continue
        if keep(record):
            records.append(record)
    return records


COLUMNS = ("node", "ranks", "GPUs", "kind", "driver", "ECC", "memlock", "/dev/shm", "free", "load", "clock", "result")


def table(report: Report) -> str:
    """Draw the report for people: a line for each node, the all-reduce, then each finding on a line of its own."""
    rows = [COLUMNS, *(_row(record, report) for record in report.nodes)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if (timed := report.all_reduce) is not None:
        lines.append(
            f"all-reduce over {len(report.ranks)} ranks ({timed.backend}): {timed.bytes / 1e6:.0f} MB in "
            f"{timed.seconds * 1e3:.2f} ms, bus bandwidth {timed.bus_gbps:.2f} GB/s"
        )
    return "\n".join([*lines, *(f"{finding.level}: {finding}" for finding in report.findings)])


def _row(record: NodeRecord, report: Report) -> tuple[str, ...]:
    own = [finding.level for finding in report.findings if finding.node == record.node]
    smi = record.smi if record.smi is not None and record.smi.state == "ok" else None
    errors = [gpu.ecc_errors for gpu in smi.gpus if gpu.ecc_errors is not None] if smi else []
    return (
        record.node,
        str(sum(rank.node == record.node for rank in report.ranks) or "?"),
        "?" if record.cuda is None else str(len(record.gpus)),
        next(iter(record.gpus), "-").removeprefix("NVIDIA "),
        (smi.driver if smi else "") or "-",
        str(sum(errors)) if errors else "-",
        "?" if record.cores is None else "unlimited" if record.memlock is None else size(record.memlock),
        *("?" if count is None else size(count) for count in (record.shm_free, record.free_bytes)),
        "?" if record.load is None else f"{record.load:.1f}/{record.cores}",
        "-" if record.skew is None else f"{record.skew:+.1f} s",
        "bad" if "error" in own else own[0] if own else "ok" if record.ready else "?",
    )


def read_table(run: Run, job_id: str, attempt: int) -> str:
    """Return the table of a finished preflight, or nothing where it left no report."""
    return str(read_record(run.preflight(job_id, attempt)).get("table", ""))
