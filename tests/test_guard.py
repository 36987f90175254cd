"""What ends or holds up training, in real ranks: the first error on top, a verdict, and no process left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from by_hand import Attempt, events, losses, make_data, make_run, processes_of, ranks_of, wait_for, weights
from conftest import environment

from pipeline.lm.watchdog import Rank, blame
from pipeline.run.goodput import read_split

TWO = "pretrain.nproc_per_node=2"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    return make_data(tmp_path_factory.mktemp("guard"), corpus)


def rank(number: int) -> Rank:
    return Rank(number, "node", 100 + number, None)


def report(number: int, waits: bool) -> dict[str, Any]:
    return {"rank": number, "waits": waits}


def test_who_holds_the_others_up() -> None:
    ranks = [rank(0), rank(1), rank(2)]
    silent, why = blame(ranks, [report(0, True), report(2, True)])
    assert (silent, "silent" in why) == ([rank(1)], True)
    busy, why = blame(ranks, [report(0, True), report(1, True), report(2, False)])
    assert (busy, "own share" in why) == ([rank(2)], True)
    assert blame(ranks, [report(n, True) for n in range(3)]) == ([], "")  # the network, then
    assert blame(ranks, [report(n, False) for n in range(3)]) == ([], "")
    assert blame([], []) == ([], "")  # before the ranks have met


def test_divergence_stops_all_ranks_and_is_never_saved(data: Path) -> None:
    run = make_run(data, "diverged", TWO)
    attempt = Attempt(run, inject="rank=1,step=15,do=nan_loss")
    assert attempt.wait() == 5
    assert attempt.verdict["verdict"] == "diverged"
    assert run.checkpoint_steps() == [0, 10]
    assert not processes_of(run)


def test_rollback_skips_the_batches_and_resumes_exactly(data: Path) -> None:
    wanted = ("pretrain.on_divergence=rollback", "pretrain.max_steps=24", "pretrain.save_interval=6")
    twin, run = make_run(data, "twin", *wanted), make_run(data, "rolled", *wanted)
    bad_batch = "rank=0,step=9,do=nan_loss"
    assert Attempt(twin, inject=bad_batch).wait() == 0
    assert [(r["step"], r["skipped"]) for r in events(twin, "rollback")] == [(6, 3)]
    assert Attempt(run, inject=f"{bad_batch};rank=0,step=15,do=kill").wait() == 1
    assert Attempt(run, number=1, inject=bad_batch).wait() == 0
    assert losses(run) == losses(twin)
    assert weights(run, 24) == weights(twin, 24)


def test_one_rank_that_raises_is_the_first_error(data: Path) -> None:
    run = make_run(data, "raises", TWO)
    attempt = Attempt(run, inject="rank=1,step=5,do=raise")
    assert attempt.wait(60) == 1
    text = attempt.text()
    assert attempt.verdict["reason"].startswith("rank 1: InjectedError")
    assert "first error, on rank 1" in text
    assert "gloo" not in text[: text.index("InjectedError: asked for")]
    before_summary = text[: text.index("ChildFailedError")] if "ChildFailedError" in text else text
    assert before_summary.count("Traceback (most recent call last)") <= 2  # the second is torchrun's own, at the end
    assert not processes_of(run)


@pytest.mark.parametrize("fault", ["kill", "exit"])
def test_a_rank_that_vanishes_is_named(data: Path, fault: str) -> None:
    run = make_run(data, f"vanishes-{fault}", TWO)
    attempt = Attempt(run, inject=f"rank=1,step=5,do={fault}")
    assert attempt.wait(60) == 1
    assert attempt.verdict["verdict"] == "crash"
    assert "rank 1 on" in attempt.verdict["reason"]
    assert not processes_of(run)


def test_a_signal_while_torch_is_imported_is_a_clean_stop(data: Path) -> None:
    run = make_run(data, "early")
    attempt = Attempt(run)
    wait_for(lambda: ranks_of(run), 20, attempt)
    time.sleep(0.3)
    os.kill(ranks_of(run)[0], signal.SIGTERM)
    assert attempt.wait(60) == 75, attempt.text()
    assert attempt.verdict["verdict"] == "stopped"
    assert not run.checkpoints.exists()


def test_save_on_request_goes_on(data: Path) -> None:
    run = make_run(data, "save", "pretrain.max_steps=300", "pretrain.save_interval=4000")
    attempt = Attempt(run)
    attempt.wait_for_step(3)
    run.save.touch()
    wait_for(lambda: not run.save.exists(), 30, attempt)
    assert len(run.checkpoint_steps()) == 2
    assert attempt.wait() == 0
    split = read_split(run)
    assert split is not None
    account = events(run, "complete")[0]["time"] - events(run, "start")[0]["began"]
    assert split.wall == pytest.approx(account, rel=0.05)


def test_a_writer_that_wakes_after_a_take_over_publishes_nothing(data: Path) -> None:
    slow = ("pretrain.max_steps=5000", "pretrain.save_interval=5", "pretrain.hang_timeout=600")
    run = make_run(data, "zombie", *slow)
    zombie = Attempt(run)
    zombie.wait_for_step(12)
    pid = ranks_of(run)[0]
    os.kill(pid, signal.SIGSTOP)
    subprocess.run(
        [sys.executable, "-m", "pipeline.run.owner", "take", str(run.root), "1", "1"], env=environment(), check=True
    )
    heir = Attempt(run, number=1)
    wait_for(lambda: events(run, "resume"), 60, heir)
    os.kill(heir.process.pid, signal.SIGTERM)
    assert heir.wait() == 75
    before = (run.checkpoint_steps(), run.metrics.read_bytes())
    os.kill(pid, signal.SIGCONT)
    assert zombie.wait(60) == 1
    assert (run.checkpoint_steps(), run.metrics.read_bytes()) == before
    assert events(run, "superseded")
    assert "nothing more is written here" in zombie.text()


def test_a_stopped_rank_is_a_hang_that_ends(data: Path) -> None:
    run = make_run(data, "hang", TWO, "pretrain.hang_timeout=2")
    attempt = Attempt(run, inject="rank=1,step=5,do=stop")
    assert attempt.wait(90) == 1
    assert attempt.verdict["verdict"] == "hang"
    assert attempt.verdict["reason"].startswith(f"hang: rank 1 on {socket.gethostname()} (process ")
    assert "after step 4" in attempt.verdict["reason"]
    assert "hang: rank 0" in attempt.text()
    assert "_backward" in attempt.text()  # the stack of the rank that waits
    assert not processes_of(run)
