"""How much of the wall time of a long Run will be training, and how often it should save.

Failures of a Job come at random, `nodes` times as often as those of one node. Each costs what was trained since the
newest checkpoint, and a restart, during which the next one may strike. (Young 1974; Daly 2006, "A higher order estimate
of the optimum checkpoint interval": the wall time of a Run with exponential failures.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Reliability:
    """What goes wrong and what it costs, all in seconds."""

    mean_time_between_failures: float  # of the whole Job: that of a node / nodes
    save: float  # that training stands still for one checkpoint
    restart: float  # from a failure to the first new step, the queue left out
    durable: float = 0.0  # after which a checkpoint that was begun can be relied on

    def share(self, interval: float) -> float:
        """Return the expected share of wall time that trains when a checkpoint begins every `interval` seconds."""
        mtbf = self.mean_time_between_failures
        # A failure before the newest checkpoint is on disk falls back to the one before: as if restarting took longer.
        restart = self.restart + self.durable
        exponent = (interval + self.save) / mtbf
        if exponent > 700 or restart / mtbf > 700:
            return 0.0
        return interval / (mtbf * math.exp(restart / mtbf) * math.expm1(exponent))

    def best_interval(self) -> float:
        """Return the interval with the largest share, in seconds; Daly's estimate."""
        mtbf, save = self.mean_time_between_failures, self.save
        if save >= 2 * mtbf:
            return mtbf
        root = math.sqrt(save / (2 * mtbf))
        return math.sqrt(2 * save * mtbf) * (1 + root / 3 + root * root / 9) - save
