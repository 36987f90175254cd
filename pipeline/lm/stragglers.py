"""Which rank makes the others wait: each rank's own time in a step, without the time it waits for the others."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from statistics import median_low

import torch
import torch.distributed as dist
from torch import Tensor, nn

INTERVALS = 3  # log intervals in a row before a rank is named: one slow moment is none of its fault


@dataclass(frozen=True)
class Straggler:
    """A rank that is persistently slower than the median."""

    rank: int
    seconds: float  # its own time per step
    median: float
    slower: float  # share above the median


@dataclass
class OwnTime:
    """Measure a step from its start to the last gradient of this rank; what follows is waiting for the others.

    On a GPU by events, since the CPU only queues the work. Without `watch` nothing is measured: where weights are
    sharded, a rank waits for the others in every layer, and has no time of its own that could be told apart.
    """

    device: str
    seconds: float = 0.0
    steps: int = 0
    _start: float = 0.0
    _end: float = 0.0
    _parameters: int = 0
    _missing: float = 0  # gradients that this rank still has to add to the step; infinity before its last part
    _events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    def watch(self, model: nn.Module) -> None:
        """Note the time whenever a gradient of `model` is complete; the last one of a step counts."""
        for parameter in model.parameters():
            self._parameters += 1
            parameter.register_post_accumulate_grad_hook(self._gradient)  # type: ignore[no-untyped-call]

    @property
    def waits(self) -> bool:
        """Tell whether this rank has done its share of the step; from there on it waits for the others."""
        return self._missing <= 0

    def start(self) -> None:
        self._start = self._end = time.perf_counter()
        self._missing = math.inf
        if self.device != "cpu" and self._parameters:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            first.record()
            self._events.append((first, last))

    def last_part(self) -> None:
        """Note that the backward pass that begins now is the last of this step."""
        self._missing = self._parameters or math.inf

    def _gradient(self, parameter: Tensor) -> None:
        self._end = time.perf_counter()
        self._missing -= 1
        if self._events:
            self._events[-1][1].record()

    def end(self) -> None:
        self._missing = 0
        self.seconds += self._end - self._start
        self.steps += 1

    def take(self) -> float:
        """Return the mean own time of a step (s) since the last call."""
        if self._events:
            torch.cuda.synchronize()
            self.seconds = sum(first.elapsed_time(last) for first, last in self._events) / 1000
            self._events.clear()
        mean = self.seconds / max(1, self.steps)
        self.seconds, self.steps = 0.0, 0
        return mean


@dataclass
class Stragglers:
    """Compare the ranks each log interval; all ranks call `compare`."""

    threshold: float  # share above the median
    slow: dict[int, int] = field(default_factory=dict)  # rank -> intervals in a row

    def compare(self, own: float) -> list[Straggler]:
        """Gather every rank's own seconds per step; return those that have just become, or still are, stragglers."""
        mine = torch.tensor([own], device="cpu")
        gathered = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, mine)
        return self.judge([value.item() for value in gathered])

    def judge(self, seconds: list[float]) -> list[Straggler]:
        """Return the ranks that were slower than the median for INTERVALS intervals; again after as many more."""
        middle = median_low(seconds)
        found = []
        for rank, own in enumerate(seconds):
            share = own / middle - 1 if middle > 0 else 0.0
            self.slow[rank] = self.slow.get(rank, 0) + 1 if share > self.threshold else 0
            if self.slow[rank] and self.slow[rank] % INTERVALS == 0:
                found.append(Straggler(rank, own, middle, share))
        return found
