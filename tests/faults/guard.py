"""What ends or holds up training, in real ranks: the first error on top, a verdict, and no process left.

The slow half of tests/test_guard.py: `nox -s faults`, or pytest tests/faults/guard.py.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from by_hand import Attempt, events, launcher_of, losses, make_data, make_run, processes_of, ranks_of, weights

from pipeline.files import read_lines
from pipeline.goodput import read_split

TWO = "pretrain.nproc_per_node=2"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    return make_data(tmp_path_factory.mktemp("guard"), corpus)


@pytest.mark.parametrize("fault", ["stop", "sleep", "gil"])
def test_a_hang_is_reported_and_ends(data: Path, fault: str) -> None:
    run = make_run(data, f"hangs-{fault}", TWO, "pretrain.hang_timeout=2")
    attempt = Attempt(run, inject=f"rank=1,step=5,do={fault}")
    assert attempt.wait(90) == 1
    assert attempt.verdict["verdict"] == "hang"
    assert events(run, "hang")
    assert "hang: rank 0" in attempt.text()
    assert "after step 4" in attempt.text()
    assert "_backward" in attempt.text()
    assert not processes_of(run)


@pytest.mark.parametrize("whom", ["script", "torchrun", "rank", "all"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_signal_anywhere_saves_and_ends(data: Path, whom: str, number: signal.Signals) -> None:
    run = make_run(data, f"signal-{whom}-{number.name}", TWO, "pretrain.max_steps=5000", "pretrain.save_interval=4000")
    attempt = Attempt(run)
    attempt.wait_for_step(5)
    ranks = ranks_of(run)
    pids = {
        "script": [attempt.process.pid], "torchrun": [launcher_of(run)], "rank": [ranks[1]],
        "all": [attempt.process.pid, launcher_of(run), *ranks.values()],
    }[whom]  # fmt: skip
    for _ in range(2):  # twice: one save
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        time.sleep(0.05)
    assert attempt.wait(60) == 75, attempt.text()
    assert attempt.verdict["verdict"] == "stopped"
    assert run.checkpoint_steps() == [0, attempt.verdict["step"]]
    assert attempt.verdict["step"] >= 5
    assert not processes_of(run)


def test_a_killed_job_script_leaves_no_ranks(data: Path) -> None:
    run = make_run(data, "script", TWO, "pretrain.max_steps=5000", "pretrain.save_interval=4000")
    attempt = Attempt(run)
    attempt.wait_for_step(3)
    os.kill(attempt.process.pid, signal.SIGKILL)
    attempt.wait()
    deadline = time.monotonic() + 30
    while processes_of(run):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert attempt.verdict["verdict"] == "stopped"


def test_a_slow_rank_is_named(data: Path) -> None:
    run = make_run(data, "slow", TWO, "pretrain.log_interval=2")
    assert Attempt(run, inject="rank=1,step=1,do=slow,seconds=0.1").wait() == 0
    named = events(run, "straggler")
    assert {event["rank"] for event in named} == {1}
    assert named[0]["rank_host"]


def test_a_killed_attempt_resumes_bitwise_and_the_time_adds_up(data: Path) -> None:
    twin, run = make_run(data, "undisturbed"), make_run(data, "killed")
    assert Attempt(twin).wait() == 0
    assert Attempt(run, inject="rank=0,step=27,do=kill").wait() == 1
    assert Attempt(run, number=1).wait() == 0
    assert losses(run) == losses(twin)
    assert weights(run, 40) == weights(twin, 40)
    split = read_split(run)
    assert split is not None
    began = events(run, "start")[0]["began"]
    assert split.wall == pytest.approx(read_lines(run.events)[-1]["time"] - began, rel=0.05)
    assert split.repeated > 0
