"""Where the time between two log lines went, and what that is of the hardware's peak."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

KINDS = ("data", "forward_backward", "optimizer", "save")
# Dense bf16 products, TFLOP/s, from the makers' data sheets; the first name that occurs in the GPU's counts.
PEAKS = {
    "B200": 2250.0, "GH200": 989.0, "H200": 989.0, "H100 PCIe": 756.0, "H100 NVL": 835.0, "H100": 989.0,
    "A100": 312.0, "L40S": 362.0,
}  # fmt: skip


class StepClock:
    """Measure the steps between two log lines: tokens per second without saves, and seconds of each kind per step.

    On a GPU, whose work is only queued here, the kinds are timed by events; they are read when the line is written.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.restart()

    def restart(self) -> None:
        self.tokens, self.steps, self.seconds, self.last = 0, 0, 0.0, time.monotonic()
        self.kinds = dict.fromkeys(KINDS, 0.0)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def add_step(self, tokens: int) -> None:
        now = time.monotonic()
        self.tokens, self.steps = self.tokens + tokens, self.steps + 1
        self.seconds, self.last = self.seconds + now - self.last, now

    def skip(self) -> None:
        """Leave out the time since the last step, which a save took."""
        now = time.monotonic()
        self.kinds["save"] += now - self.last
        self.last = now

    @contextmanager
    def during(self, kind: str) -> Iterator[None]:
        """Book the body on `kind`; the data's time is the CPU's."""
        if self.device == "cpu" or kind == "data":
            began = time.monotonic()
            yield
            self.kinds[kind] += time.monotonic() - began
            return
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        first.record()
        yield
        last.record()
        self._events.append((kind, first, last))

    def tokens_per_s(self) -> float:
        return round(self.tokens / self.seconds, 1) if self.seconds > 0 else 0.0

    def split(self) -> dict[str, float]:
        """Return the mean seconds per step of each kind."""
        if self._events:
            torch.cuda.synchronize()
            for kind, first, last in self._events:
                self.kinds[kind] += first.elapsed_time(last) / 1000
            self._events.clear()
        return {f"{kind}_s": round(seconds / max(1, self.steps), 5) for kind, seconds in self.kinds.items()}


def peak_flops(stated_tflops: float | None, device: str) -> float | None:
    """Return what one rank could do at best, in FLOP/s: as stated, or as its GPU's maker says; None if not known."""
    if stated_tflops is not None:
        return stated_tflops * 1e12
    if device == "cpu":
        return None
    name = torch.cuda.get_device_name(device)
    return next((tflops * 1e12 for part, tflops in PEAKS.items() if part in name), None)


def peak_memory(device: str) -> int:
    """Return the most bytes that this process has held: of the GPU, or without one of main memory."""
    if device == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(torch.cuda.max_memory_allocated(device))


def measured(clock: StepClock, flops_per_token: float, peak: float | None, ranks: int, device: str) -> dict[str, Any]:
    """Return the fields of a line of metrics that tell of speed and memory; MFU against `peak` FLOP/s per rank."""
    speed = clock.tokens_per_s()
    mfu = None if peak is None else round(speed * flops_per_token / (peak * ranks), 4)
    return {"tokens_per_s": speed, "mfu": mfu, **clock.split(), "peak_memory": peak_memory(device)}
