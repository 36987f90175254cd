"""The split of a Run's wall time adds up to it, whatever happened."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.files import write_json
from pipeline.lm.ledger import Ledger
from pipeline.run.folder import Run
from pipeline.run.goodput import Split, read_split, split


def account(began: float, first: int, marks: list[Any], ended: float | None = None, **seconds: float) -> dict[str, Any]:
    until = began + sum(seconds.values())
    return {"began": began, "until": until, "first": first, "marks": marks, "seconds": seconds, "ended": ended}


def test_an_undisturbed_attempt_is_its_own_account() -> None:
    found = split([account(100, 0, [[0, 0, 0], [50, 80, 2]], startup=10, load=1, data=2, step=80, save=7)])
    assert found is not None
    assert found.wall == pytest.approx(100)
    assert found.goodput == pytest.approx(0.8)


def test_lost_steps_are_repeated_and_gaps_are_down() -> None:
    killed = account(100, 0, [[0, 0, 0], [50, 40, 1]], startup=10, step=60, data=2, save=3, ended=180)
    again = account(200, 50, [[50, 0, 0], [100, 70, 0]], startup=10, load=2, step=70)
    found = split([again, killed])
    assert found is not None
    assert found.wall == pytest.approx(282 - 100)
    assert (found.step, found.data) == (pytest.approx(40 + 70), pytest.approx(1))
    assert found.repeated == pytest.approx(20 + 1 + 5)  # 5 s between its last account and its end
    assert found.down == pytest.approx(20)


def test_a_fall_back_to_an_older_checkpoint_loses_more() -> None:
    first = account(0, 0, [[0, 0, 0], [10, 10, 0], [20, 20, 0]], step=25)
    second = account(30, 10, [[10, 0, 0]], step=5)
    found = split([first, second])
    assert found is not None
    assert (found.step, found.repeated, found.down) == (15, 15, 5)


def test_waiting_for_a_former_attempt_counts_once() -> None:
    """The second script waits from 90 on for the first, which saves until 100."""
    first = account(0, 0, [[0, 0, 0], [10, 80, 0]], startup=10, step=80, save=10)
    second = account(90, 10, [[10, 0, 0]], startup=25, step=50)
    refused = account(40, 0, [], startup=5) | {"first": None, "marks": []}  # while the first was training
    found = split([first, second, refused])
    assert found is not None
    assert found.wall == pytest.approx(165)
    assert (found.startup, found.step, found.down) == (pytest.approx(25), pytest.approx(130), 0)


def test_attempts_that_never_trained_are_start_up(tmp_path: Path) -> None:
    run = Run(tmp_path)
    write_json(run.verdict("2", 0), {"verdict": "config", "stage": "pretrain", "began": 100.0, "time": 104.0})
    write_json(run.verdict("1", 0), {"verdict": "complete", "stage": "tokenize", "began": 50.0, "time": 90.0})
    write_json(run.ledger("2", 1), account(110, 0, [[0, 0, 0]], startup=10, step=80))
    write_json(run.verdict("2", 1), {"verdict": "complete", "stage": "pretrain", "began": 110.0, "time": 200.0})
    found = read_split(run)
    assert found is not None
    assert (found.startup, found.down, found.step, found.wall) == (14, 6, 80, 100)


def test_time_after_the_last_account_is_start_up_until_training_has_begun() -> None:
    begun = account(0, 0, [[0, 0, 0]], startup=10, step=5)
    starting = account(0, 0, [], startup=10) | {"first": None}
    assert (split([begun], now=20) or Split()).step == 10
    assert (split([starting], now=20) or Split()).startup == 20


def test_garbled_accounts_are_left_out() -> None:
    assert split([{}, {"began": "x"}, {"began": 1.0, "seconds": []}]) is None


def test_a_ledger_books_every_moment_once() -> None:
    written: list[dict[str, Any]] = []
    ledger = Ledger(0.0, written.append)
    ledger.seconds["startup"] = 0.0
    with ledger.during("load"):
        pass
    ledger.enter("step")
    ledger.mark(ledger.here(0))
    with ledger.during("data"):
        time.sleep(0.01)
    ledger.roll_back(0)
    ledger.write(now=True)
    assert written[0]["until"] == pytest.approx(sum(written[0]["seconds"].values()), abs=1e-3)
    assert written[0]["first"] == 0
    assert written[0]["seconds"]["repeated"] > 0
