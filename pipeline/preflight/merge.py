"""From the records of all nodes and ranks to one Report: who is missing, who stands out, what does not fit together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from statistics import median, median_low
from typing import Literal

from pipeline.preflight.findings import AllReduce, Finding, NodeRecord, RankRecord, Report, Wanted, merge
from pipeline.preflight.rules import SMALL_STEP, node_findings

PHASES = (
    "arrived", "looking around", "asking nvidia-smi", "importing torch", "looking at the GPUs", "looking for rank 0",
    "waiting for rank 0's word", "waiting for the others", "joining the process group", "all-reduce", "done",
)  # fmt: skip
SLOW_FACTOR = 2.0  # below the median of the nodes' own all-reduce
DRAIN = "have the node drained and looked at"
ONE_LAUNCHER = (
    "start one launcher per node (srun --ntasks-per-node=1 torchrun …), or one rank per task without torchrun"
)


def judge(
    nodes: list[NodeRecord],
    ranks: list[RankRecord],
    wanted: Wanted,
    all_reduce: AllReduce | None = None,
    *,
    timed_out: bool = False,
) -> Report:
    """Judge what has arrived by now. Only when time is over (`timed_out`) is what is missing anyone's fault."""
    nodes = sorted(nodes, key=lambda node: (node.rank, node.node, node.pid))
    ranks = sorted(ranks, key=lambda rank: (rank.rank, rank.node, rank.pid))
    findings = [
        *(_missing(nodes, ranks, wanted) if timed_out else ()),
        *(finding for node in nodes if node.ready or timed_out for finding in node_findings(node, wanted)),
        *_doubles(nodes, ranks),
        *_world(ranks, wanted),
        *_variables(ranks, wanted),
        *_loopback(nodes),
        *_cpus(nodes, ranks),
        *_clocks(nodes, wanted),
        *_bandwidth(nodes, wanted, all_reduce),
    ]
    return Report(nodes, ranks, merge(findings, len({node.node for node in nodes})), all_reduce)


def judge_hang(nodes: list[NodeRecord], wanted: Wanted, doing: str) -> Report:
    """Judge by the nodes' last words, when rank 0 itself gets no further than `doing`."""
    nodes = sorted(nodes, key=lambda node: (node.rank, node.node, node.pid))
    behind = [node for node in nodes if not node.ready]
    if not behind and len({node.doing for node in nodes}) > 1:
        first = min((node.doing for node in nodes), key=PHASES.index)
        behind = [node for node in nodes if node.doing == first]
    missing = list(_missing(nodes, [], wanted))
    limit = f"within {wanted.limits.timeout:g} s"
    findings = missing + [
        Finding("error", node.node, f"got no further {limit} than: {node.doing}", DRAIN, "absent") for node in behind
    ]
    if not findings:
        cause = f"all nodes wait {limit} in: {doing}"
        findings = [Finding("error", None, cause, "see what NCCL_DEBUG=INFO tells, and try halves of the nodes")]
    return Report(nodes, [], findings)


def _missing(nodes: list[NodeRecord], ranks: list[RankRecord], wanted: Wanted) -> Iterator[Finding]:
    limit = f"within {wanted.limits.timeout:g} s"
    here = {node.node for node in nodes}
    for name in wanted.nodes:
        if name not in here:
            cause = f"did not arrive {limit}: no file of it in the Run's folder"
            remedy = "look at its slurmd, at the container's start in the log, and whether it mounts the Run's folder"
            yield Finding("error", name, cause, remedy, "absent")
    if not ranks:
        return
    present = {rank.rank for rank in ranks}
    for node in nodes:
        absent = sorted(set(range(node.rank, node.rank + wanted.nproc_per_node)) - present)
        if absent and node.ready and not (node.master and node.master.error):
            cause = f"did not hear of rank {', '.join(map(str, absent))} {limit}"
            yield Finding("error", node.node, cause, "read what those ranks say in the log", "absent")
    if not wanted.nodes and len(here) * wanted.nproc_per_node < wanted.world_size:
        absent = sorted(set(range(wanted.world_size)) - present)
        cause = f"{len(absent)} of {wanted.world_size} ranks did not arrive {limit}: {', '.join(map(str, absent[:20]))}"
        yield Finding("error", None, cause, "see which of their nodes say nothing in the log")


def _doubles(nodes: list[NodeRecord], ranks: list[RankRecord]) -> Iterator[Finding]:
    """Find what is there twice: launchers of a node, rank numbers, devices."""
    for name, count in Counter(node.node for node in nodes).items():
        own = [node for node in nodes if node.node == name]
        launchers = sorted({node.launcher or node.pid for node in own})
        if count > 1:
            who = ", ".join(f"process {pid}" for pid in launchers)
            yield Finding("error", None, f"{len(launchers)} launchers on {name}: {who}", ONE_LAUNCHER)
    numbers: dict[int, list[RankRecord]] = {}
    devices: dict[tuple[str, str], list[RankRecord]] = {}
    for rank in ranks:
        numbers.setdefault(rank.rank, []).append(rank)
        devices.setdefault((rank.node, rank.device), []).append(rank)
    for number, same in numbers.items():
        if len(same) > 1:
            who = " and ".join(f"process {rank.pid} on {rank.node}" for rank in same)
            yield Finding("error", None, f"rank {number} is there {len(same)} times: {who}", ONE_LAUNCHER)
    for (node, device), same in devices.items():
        if len(same) > 1:
            who = " and ".join(f"rank {rank.rank} (process {rank.pid})" for rank in same)
            yield Finding("error", None, f"{who} share {device} on {node}", ONE_LAUNCHER)


def _world(ranks: list[RankRecord], wanted: Wanted) -> Iterator[Finding]:
    sizes = Counter(rank.world_size for rank in ranks)
    if len(sizes) > 1:
        odd = min(sizes, key=lambda count: sizes[count])
        named = next(rank for rank in ranks if rank.world_size == odd)
        others = ", ".join(str(count) for count in sizes if count != odd)
        cause = f"{named} was told a world size of {odd}, others {others}"
        yield Finding("error", None, cause, ONE_LAUNCHER)
    elif sizes and wanted.nodes and (world := next(iter(sizes))) != len(wanted.nodes) * wanted.nproc_per_node:
        cause = (
            f"the world size is {world}, but {len(wanted.nodes)} nodes x {wanted.nproc_per_node} ranks = "
            f"{len(wanted.nodes) * wanted.nproc_per_node}"
        )
        yield Finding("error", None, cause, ONE_LAUNCHER)
    for rank in ranks:
        if rank.local_world_size != wanted.nproc_per_node:
            cause = f"{rank.local_world_size} ranks per node were started, but pretrain.nproc_per_node is "
            yield Finding("error", None, f"{rank}: {cause}{wanted.nproc_per_node}", ONE_LAUNCHER)
            return


def _variables(ranks: list[RankRecord], wanted: Wanted) -> Iterator[Finding]:
    """Compare every rank's variables with the launch file, and those that it does not list with the other ranks'."""
    unlisted = "write it below env in the cluster file, so that every rank gets it"
    changed = "Slurm's TaskProlog, a hook of Enroot or the image's start changes it on its way; have that removed"
    for name in sorted({name for rank in ranks for name in rank.variables} | set(wanted.variables)):
        usual, source = wanted.variables.get(name), "the launch file"
        if usual is None:
            counted = Counter(rank.variables[name] for rank in ranks if name in rank.variables)
            usual, source = counted.most_common(1)[0][0] if counted else None, "other ranks"
        off: dict[str, RankRecord] = {}  # one rank of each node is enough to see it by
        for rank in ranks:
            if name not in rank.variables or rank.variables[name] != usual:
                off.setdefault(rank.node, rank)
        everywhere = len(off) > 1 and len(off) == len({rank.node for rank in ranks})
        for rank in list(off.values())[: 1 if everywhere else None]:
            value = repr(rank.variables[name]) if name in rank.variables else "not set"
            cause = f"{name} is {value} on rank {rank.rank} ({rank.node}), and {usual!r} in {source}"
            listed = name in wanted.variables
            level: Literal["error", "warning"] = "error" if listed else "warning"
            yield Finding(level, None if everywhere else rank.node, cause, changed if listed else unlisted, "profile")


def _loopback(nodes: list[NodeRecord]) -> Iterator[Finding]:
    """Find nodes for which rank 0 is themselves. Nodes that are one machine (a test's) may use its loopback."""
    if len({node.boot_id for node in nodes if node.boot_id}) < 2:
        return
    for node in nodes:
        if (
            node.master is not None and node.master.loopback and node.rank != 0
        ):  # rank 0 listens on all of its addresses
            cause = f"the name of rank 0, {node.master.name}, is a loopback address here: {node.master.addresses[0]}"
            remedy = "remove that line of its /etc/hosts: the name must lead to an address of the nodes' network"
            yield Finding("error", node.node, cause, remedy, "names")


def _cpus(nodes: list[NodeRecord], ranks: list[RankRecord]) -> Iterator[Finding]:
    """Find nodes whose ranks together may use less than half of the Job's CPUs; Slurm may count threads or cores."""
    for node in nodes:
        masks = [int(rank.cpus, 16) for rank in ranks if rank.node == node.node and rank.cpus]
        union = 0
        for mask in masks:
            union |= mask
        if masks and node.granted.cpus is not None and union.bit_count() * 2 < node.granted.cpus:
            cause = f"its ranks may run on {union.bit_count()} CPUs, and the Job has {node.granted.cpus} there"
            yield Finding("warning", node.node, cause, SMALL_STEP)


def _clocks(nodes: list[NodeRecord], wanted: Wanted) -> Iterator[Finding]:
    """Blame the clocks that are far from the median's; of two nodes, the one that the file system contradicts too."""
    limit = wanted.limits.max_clock_skew
    told = [(node, node.skew) for node in nodes if node.skew is not None]
    if len(told) < 2:
        return
    middle = median_low([skew for _, skew in told])
    off = [(node, skew - middle) for node, skew in told if abs(skew - middle) > limit]
    remedy = "have its time synchronized (chronyc tracking, timedatectl), or raise preflight.max_clock_skew"
    if len(told) == 2 and off:
        apart = abs(told[0][1] - told[1][1])
        wrong = [node for node, _ in told if node.file_skew is not None and abs(node.file_skew) > limit]
        cause = f"the clocks of {told[0][0].node} and {told[1][0].node} are {apart:.1f} s apart"
        yield Finding("error", wrong[0].node if len(wrong) == 1 else None, cause, remedy, "clock")
        return
    for node, skew in off:
        cause = f"its clock is {abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} the other nodes'"
        yield Finding("error", node.node, cause, remedy, "clock")


def _bandwidth(nodes: list[NodeRecord], wanted: Wanted, all_reduce: AllReduce | None) -> Iterator[Finding]:
    floor = wanted.limits.min_bus_gbps
    too_slow = all_reduce is not None and floor is not None and all_reduce.bus_gbps < floor
    rates = [(node, node.local_gbps) for node in nodes if node.local_gbps is not None]
    middle = median([rate for _, rate in rates]) if rates else 0.0
    slow = [(node, rate) for node, rate in rates if len(rates) > 1 and rate * SLOW_FACTOR < middle]
    for node, rate in slow:
        cause = f"an all-reduce between its own ranks makes {rate:.2f} GB/s, the median of all nodes is {middle:.2f}"
        level: Literal["error", "warning"] = "error" if too_slow else "warning"
        yield Finding(level, node.node, cause, "have the links between its GPUs looked at", "slow")
    if too_slow and all_reduce is not None:
        cause = f"the all-reduce makes {all_reduce.bus_gbps:.2f} GB/s, preflight.min_bus_gbps is {floor:g}"
        remedy = "look at the transport that NCCL_DEBUG=INFO tells, and try halves of the nodes with sbatch -w"
        yield Finding("error", None, cause, remedy)
