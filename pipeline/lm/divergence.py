"""Spikes of the loss: its z-score over a window of past steps, with a state that a checkpoint holds exactly."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass


@dataclass
class SpikeDetector:
    """Exponentially weighted mean and variance of the loss, of the weight of a window of `window` steps.

    Not the window's losses themselves: two floats go into a checkpoint, so that a resumed run decides as its twin does.
    """

    threshold: float | None  # standard deviations; None: off
    window: int  # steps
    mean: float = 0.0
    variance: float = 0.0
    count: int = 0

    def score(self, loss: float) -> float | None:
        """Return how many standard deviations `loss` lies above the mean, if it is a spike; None if not."""
        if self.threshold is None or self.count < self.window:
            return None
        # A loss that hardly moves must not make a spike of its rounding: a thousandth of it counts as one deviation.
        deviation = max(math.sqrt(self.variance), 1e-3 * abs(self.mean), 1e-12)
        score = (loss - self.mean) / deviation
        return score if score > self.threshold else None

    def add(self, loss: float) -> None:
        """Take a step's loss in; a spike no further than the threshold, so that one does not hide the next."""
        if self.threshold is None:
            return
        if self.score(loss) is not None:
            loss = self.mean + self.threshold * math.sqrt(self.variance)
        self.count += 1
        weight = max(2.0 / (self.window + 1), 1.0 / self.count)
        change = loss - self.mean
        self.mean += weight * change
        self.variance = (1 - weight) * (self.variance + weight * change * change)

    def to_counters(self) -> dict[str, int]:
        """Return the state as integers, of which a checkpoint's counters are made: floats by their bits."""
        return {"spike_mean": _bits(self.mean), "spike_variance": _bits(self.variance), "spike_count": self.count}

    def load(self, counters: dict[str, int]) -> None:
        """Take the state from a checkpoint's counters."""
        self.mean, self.variance = _float(counters["spike_mean"]), _float(counters["spike_variance"])
        self.count = counters["spike_count"]


def _bits(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _float(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
