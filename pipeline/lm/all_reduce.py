"""A timed all-reduce: does the network carry what it should? Bandwidths as nccl-tests defines them, GB = 10^9 bytes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store

BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}  # large enough that latency does not count
SECONDS = 1.0  # to measure for
MOST = 20  # repetitions


@dataclass(frozen=True)
class Timed:
    """The slowest rank's time for one all-reduce, and what follows from it."""

    backend: str
    bytes: int
    seconds: float
    bus_gbps: float


def bus_gbps(count: int, seconds: float, ranks: int) -> float:
    """Return the bus bandwidth of an all-reduce of `count` bytes: what each link carries, whatever the rank count."""
    return count / seconds * 2 * (ranks - 1) / ranks / 1e9


def join(store: Store, rank: int, world_size: int, device: str, seconds: float) -> None:
    """Join the other ranks, as training does, within `seconds`."""
    if device != "cpu":
        torch.cuda.set_device(device)
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=seconds))


def leave() -> None:
    """Leave the other ranks; without it gloo aborts at exit now and then."""
    dist.destroy_process_group()


def time_all(device: str) -> Timed:
    """Time it over all ranks; all call it."""
    return _timed(device, None, dist.get_world_size())


def time_node(device: str, ranks: list[int]) -> Timed | None:
    """Time it between the ranks of this node, which all call it; None if there is one only."""
    if len(ranks) < 2:
        return None
    # Only the members meet for it: a thousand nodes need not wait for a thousand groups.
    group = dist.new_group(ranks, use_local_synchronization=True)
    return _timed(device, group, len(ranks))


def _timed(device: str, group: dist.ProcessGroup | None, ranks: int) -> Timed:
    kind = device.partition(":")[0]
    content = torch.ones(BYTES[kind] // 4, device=device)

    def once() -> None:
        dist.all_reduce(content, group=group)
        if kind == "cuda":
            torch.cuda.synchronize()

    once()  # connections are made at the first
    if not bool((content == ranks).all()):
        raise ArithmeticError(f"the sum of {ranks} ones over the ranks came out wrong on {device}")
    content.zero_()  # sums that stay finite
    began = time.perf_counter()
    once()
    single = _slowest(time.perf_counter() - began, device, group)
    repeats = max(1, min(MOST, int(SECONDS / single)))
    began = time.perf_counter()
    for _ in range(repeats):
        once()
    seconds = _slowest((time.perf_counter() - began) / repeats, device, group)
    return Timed("gloo" if kind == "cpu" else "nccl", BYTES[kind], seconds, bus_gbps(BYTES[kind], seconds, ranks))


def _slowest(seconds: float, device: str, group: dist.ProcessGroup | None) -> float:
    value: Tensor = torch.tensor([seconds], device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group)
    return float(value.item())
