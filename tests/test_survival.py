"""The probability that the chain's own rules end a healthy Run agrees with histories that those rules decide."""

from __future__ import annotations

import math
import random
import time
from dataclasses import replace

import pytest

from pipeline.plan.survival import LIKE_A_MACHINE, LIKE_A_PROGRAM, Survival, survival_text
from pipeline.run.decision import Attempt, no_progress

DAY = 86_400.0
# 1,000 nodes for six weeks, 20 min to the first save, a failure of a node in 150 days.
R7 = Survival(150 * DAY / 1000, first_save=1200.0, duration=42 * DAY)
LIKE_TODAY = replace(R7, like_a_machine=0.0, like_a_program=1.0)  # any two failures were taken for the same cause
NAMED = replace(R7, like_a_machine=0.0, like_a_program=0.0)  # each is a node's that Slurm or preflight names


def ends(survival: Survival, seed: int) -> bool:
    """Tell whether run/decision.py ends one random history."""
    draw, now, fruitless = random.Random(seed), 0.0, list[Attempt]()
    while True:
        lived = draw.expovariate(1 / survival.mean_time_between_failures)
        now += lived
        if now > survival.duration:
            return False
        if lived >= survival.first_save:
            fruitless.clear()
            continue
        kind = draw.random()
        if kind < survival.like_a_machine:
            attempt = Attempt("7", 0, "hang", "", 100, 100, cause="hang")
        elif kind < survival.like_a_machine + survival.like_a_program:
            attempt = Attempt("7", 0, "crash", "", 100, 100, cause="crash: the same words")
        else:
            attempt = Attempt("7", 0, "lost", "", 100, 100, cause="lost")
        fruitless.append(attempt)
        if no_progress(fruitless, survival.tries):
            return True


@pytest.mark.parametrize(
    "survival",
    [
        LIKE_TODAY,
        replace(R7, first_save=4000.0),
        replace(R7, first_save=7000.0, tries=3),
        replace(R7, first_save=1200.0, tries=1),
        replace(NAMED, first_save=9000.0),
        replace(R7, first_save=3000.0, like_a_machine=0.9, like_a_program=0.1),
        replace(R7, first_save=7200.0, duration=2 * DAY),
    ],
)
def test_it_is_what_the_rules_do_to_random_histories(survival: Survival) -> None:
    histories = 500
    ended = sum(ends(survival, seed) for seed in range(histories)) / histories
    expected = survival.ending()
    assert 0.02 < expected < 0.98
    assert ended == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / histories))


def test_a_healthy_chain_of_six_weeks_on_a_thousand_nodes_is_ended_in_less_than_one_of_a_hundred() -> None:
    assert LIKE_TODAY.ending() == pytest.approx(0.86, abs=0.01)  # what the rule did that counted any two failures
    assert R7.ending() <= 0.01
    assert NAMED.ending() < 1e-5
    assert (LIKE_A_MACHINE, LIKE_A_PROGRAM) == (0.5, 0.05)


def test_the_larger_bound_holds_for_twice_the_nodes_and_twice_the_time_to_a_save() -> None:
    assert replace(NAMED, mean_time_between_failures=NAMED.mean_time_between_failures / 2).ending() < 0.001
    assert replace(NAMED, first_save=2400.0).ending() < 0.001


def test_by_arithmetic_where_that_is_easy() -> None:
    """The second of two failures in a row ends it, so it lives on after n with a known recurrence."""
    q = LIKE_TODAY.fruitless
    alive, young = 1.0, 0.0  # young: after one fruitless attempt
    lasting, mean = 0.0, LIKE_TODAY.failures
    for count in range(1500):
        lasting += math.exp(count * math.log(mean) - mean - math.lgamma(count + 1)) * alive
        alive, young = alive - young * q, (alive - young) * q
    assert LIKE_TODAY.ending() == pytest.approx(1 - lasting, rel=1e-9)


def test_extremes() -> None:
    assert replace(R7, duration=0.0).ending() == 0.0
    assert replace(R7, first_save=0.0).ending() == 0.0
    assert replace(R7, first_save=1e9).ending() == pytest.approx(1.0)
    assert replace(R7, tries=1000).ending() < 1e-9
    assert replace(R7, mean_time_between_failures=1e-3).ending() == pytest.approx(1.0)
    assert replace(R7, mean_time_between_failures=1e15).ending() < 1e-12


def test_more_of_what_is_bad_makes_it_worse() -> None:
    first = [replace(R7, first_save=seconds).ending() for seconds in (300, 1200, 2400, 4800)]
    nodes = [replace(R7, mean_time_between_failures=150 * DAY / count).ending() for count in (64, 500, 1000, 4000)]
    tries = [replace(R7, first_save=4000.0, tries=count).ending() for count in (4, 3, 2, 1)]
    assert [sorted(row) for row in (first, nodes, tries)] == [first, nodes, tries]


def test_it_costs_a_plan_next_to_nothing() -> None:
    began = time.process_time()
    for tries in (1, 2, 8, 1000):
        for first in (60.0, 1200.0, 12_000.0, 120_000.0):
            replace(R7, first_save=first, tries=tries).ending()
    assert time.process_time() - began < 16 * 0.1


def test_in_words() -> None:
    assert survival_text(R7) == (
        "0.68% that random failures alone end the chain (no_progress) in 42.0 days: one in 3.6 h, 8.8% of them before "
        "the first save, after 20 min"
    )
    assert "less than 0.01% that" in survival_text(NAMED)
    assert survival_text(LIKE_TODAY).endswith("; lower pretrain.save_interval")
