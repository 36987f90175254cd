"""How likely the chain's own rules (run/decision.py) end a Run that only meets random failures.

A failure that comes before a new step is saved is fruitless. Failures come at random, so each is, with the same
probability q = 1 - exp(-first save / mean time between failures). A Markov chain over the fruitless ones in a row tells
how often the rules give up; the number of failures in the Run's duration is Poisson's.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

from pipeline.run.decision import MACHINE_FACTOR, MOST_FAILURES

# What random failures look like. Of the 419 unexpected interruptions of Llama 3's 54 days on 16,384 GPUs (Dubey et al.
# 2024, table 5) 78 % were hardware's. A node that Slurm gives up, or that preflight blames, is told from the next one.
# Half of all is taken to leave the same words each time (a hang, a closed connection, an ECC error of CUDA), though one
# in ten was the network's; and 5 % words that a program might use (watchdog time-outs, silent errors, heat: 4.5 %).
LIKE_A_MACHINE, LIKE_A_PROGRAM = 0.5, 0.05
DAY = 86_400
MOST_TRIES = 8  # more are reckoned like this many: nothing to see beyond it
FORGOTTEN = 1e-18  # a probability that no longer matters
MOST_STEPS = 2000
WORTH_A_WORD = 0.01
State = tuple[int, str, int]  # fruitless attempts, the last cause's kind, how often it came in a row


@dataclass(frozen=True)
class Survival:
    """A Run among random failures; all times in seconds."""

    mean_time_between_failures: float  # of the whole Job: that of a node / nodes
    first_save: float  # from the start of an attempt until its first new step is saved
    duration: float
    tries: int = 2  # max_restarts_without_progress
    like_a_machine: float = LIKE_A_MACHINE
    like_a_program: float = LIKE_A_PROGRAM

    @property
    def fruitless(self) -> float:
        """Return the probability that a failure comes before the first save."""
        return -math.expm1(-self.first_save / self.mean_time_between_failures)

    @property
    def failures(self) -> float:
        """Return how many failures are expected."""
        return self.duration / self.mean_time_between_failures

    def ending(self) -> float:
        """Return the probability that the rules end the Run."""
        survival = self._by_failures()
        ratio = survival[-1] / survival[-2] if survival[-1] > FORGOTTEN else 0.0
        # From there on each failure is survived by the same share, so the rest of Poisson's sum has a closed form.
        scale = survival[-1] / ratio ** (len(survival) - 1) if ratio > 0 else 0.0
        lasting = scale * math.exp(-self.failures * (1 - ratio))
        for count, alive in enumerate(survival):
            lasting += _poisson(count, self.failures) * (alive - scale * ratio**count)
        return min(1.0, max(0.0, 1 - lasting))

    def _by_failures(self) -> list[float]:
        """Return the probability that the chain lives on after 0, 1, 2 … failures, until the ratio is steady."""
        states: dict[State, float] = {(0, "", 0): 1.0}
        survival = [1.0]
        while len(survival) < MOST_STEPS:
            states = self._after_a_failure(states)
            survival.append(sum(states.values()))
            if survival[-1] < FORGOTTEN or (len(survival) > 2 * MOST_FAILURES and _is_steady(survival[-4:])):
                break
        return survival

    def _after_a_failure(self, states: dict[State, float]) -> dict[State, float]:
        tries = min(self.tries, MOST_TRIES)
        bounds = {"machine": MACHINE_FACTOR * tries, "program": tries}
        most = max(MOST_FAILURES, MACHINE_FACTOR * tries)
        named = 1 - self.like_a_machine - self.like_a_program
        after: defaultdict[State, float] = defaultdict(float)
        for (count, kind, row), weight in states.items():
            after[0, "", 0] += weight * (1 - self.fruitless)
            if weight < FORGOTTEN or count + 1 >= most:
                continue
            after[count + 1, kind, row] += weight * self.fruitless * named
            for new, share in (("machine", self.like_a_machine), ("program", self.like_a_program)):
                times = row + 1 if new == kind else 1
                if share and times < bounds[new]:
                    after[count + 1, new, times] += weight * self.fruitless * share
        return after


def _is_steady(survival: list[float]) -> bool:
    ratios = [later / sooner for sooner, later in pairwise(survival)]
    return max(ratios) - min(ratios) < 1e-13


def _poisson(count: int, mean: float) -> float:
    """Return the probability of `count` events where `mean` are expected."""
    if mean <= 0:
        return float(count == 0)
    return math.exp(count * math.log(mean) - mean - math.lgamma(count + 1))


def survival_text(survival: Survival) -> str:
    """Say how likely the rules end the Run."""
    ending, days = survival.ending(), survival.duration / DAY
    share = f"{ending:.2%}" if ending >= 0.0001 else "less than 0.01%"
    text = (
        f"{share} that random failures alone end the chain (no_progress) in {days:,.1f} days: one in "
        f"{survival.mean_time_between_failures / 3600:,.1f} h, {survival.fruitless:.1%} of them before the first save, "
        f"after {survival.first_save / 60:,.0f} min"
    )
    return f"{text}; lower pretrain.save_interval" if ending > WORTH_A_WORD else text
