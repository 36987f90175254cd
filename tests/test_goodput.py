"""The split of a Run's wall time adds up to it, whatever happened."""

from __future__ import annotations

import time
from typing import Any

import pytest

from pipeline.goodput import split
from pipeline.lm.ledger import Ledger


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
