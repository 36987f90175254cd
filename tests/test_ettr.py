"""The model of lost time agrees with simulated histories, and its best interval is the best."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from pipeline.plan.ettr import Reliability

DAY = 86_400.0


def simulate(reliability: Reliability, interval: float, work: float, seed: int) -> float:
    """Return the share of wall time that trains in one random history of `work` seconds of training."""
    draw = random.Random(seed)
    wall = saved = 0.0
    previous = 0.0  # work in the checkpoint before the newest
    failure = draw.expovariate(1 / reliability.mean_time_between_failures)
    durable_at = -math.inf
    while saved < work:
        end = wall + interval + reliability.save
        if end <= failure:
            previous, saved, wall = saved, saved + interval, end
            durable_at = end + reliability.durable
            continue
        if failure < durable_at:  # the newest was not yet on disk
            saved = previous
        wall = failure
        while True:  # restarts may fail too
            failure = wall + draw.expovariate(1 / reliability.mean_time_between_failures)
            if failure > wall + reliability.restart:
                wall += reliability.restart
                break
            wall = failure
        previous = saved
        durable_at = -math.inf
    return saved / wall


@pytest.mark.parametrize(
    ("nodes", "save", "restart", "durable", "interval"),
    [
        (1, 1.0, 60.0, 5.0, 1800.0),
        (64, 0.5, 300.0, 30.0, 1800.0),
        (1000, 0.5, 300.0, 60.0, 600.0),
        (1000, 10, 900, 0, 3600),
    ],
)
def test_the_model_is_within_5_percent_of_a_simulation(
    nodes: int, save: float, restart: float, durable: float, interval: float
) -> None:
    reliability = Reliability(150 * DAY / nodes, save, restart, durable)
    shares = [simulate(reliability, interval, 30 * DAY, seed) for seed in range(20)]
    assert reliability.share(interval) == pytest.approx(statistics.mean(shares), rel=0.05)


@pytest.mark.parametrize(("nodes", "save"), [(8, 0.1), (64, 5.0), (1000, 30.0)])
def test_no_other_interval_is_better_than_the_best(nodes: int, save: float) -> None:
    reliability = Reliability(150 * DAY / nodes, save, restart=300.0)
    best = reliability.best_interval()
    for factor in (0.5, 0.8, 1.25, 2.0):
        assert reliability.share(best * factor) <= reliability.share(best) + 1e-6


def test_more_nodes_train_a_smaller_share_and_save_more_often() -> None:
    few, many = (Reliability(150 * DAY / nodes, 1.0, 300.0) for nodes in (8, 1024))
    assert few.share(few.best_interval()) > many.share(many.best_interval())
    assert few.best_interval() > many.best_interval()


def test_a_machine_that_fails_faster_than_it_saves_trains_nothing() -> None:
    assert Reliability(1.0, 10_000.0, 10_000.0).share(10_000.0) == 0.0
