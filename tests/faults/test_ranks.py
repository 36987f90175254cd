"""One rank of one, two or four fails in each way that a rank can: all end, the cause is named, and a resume is exact."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from by_hand import Attempt, events, left_over, losses, make_data, make_run, processes_of, weights

from pipeline.run.folder import Run

STEPS = 24
KEYS = (f"pretrain.max_steps={STEPS}", "pretrain.save_interval=8", "pretrain.micro_batch_size=1")
PLACES = [(1, 0), (2, 0), (2, 1), (4, 0), (4, 1), (4, 3)]  # (ranks, the one that fails)
# What a rank does -> the verdict, and words of its reason; with one rank the job script alone is left to tell.
FAULTS = {
    "kill": ("crash", "is gone: it was killed", "killed (SIGKILL)"),
    "segfault": ("crash", "is gone: it was killed", "killed by signal 11"),
    "exit": ("crash", "is gone: it was killed, or ended by itself", "ended with status 0 and left no verdict"),
    "raise": ("crash", "InjectedError: asked for", "InjectedError: asked for"),
    "stop": ("hang", "silent since: stopped", ""),
}

# A rank that is alone and stopped has nobody to notice it.
CASES = [(*place, fault) for place in PLACES for fault in FAULTS if (place[0], fault) != (1, "stop")]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    return make_data(tmp_path_factory.mktemp("ranks"), corpus)


def train(data: Path, name: str, ranks: int, *more: str) -> Run:
    return make_run(data, name, *KEYS, f"pretrain.nproc_per_node={ranks}", "pretrain.hang_timeout=4", *more)


@pytest.fixture(scope="module")
def twins(data: Path) -> dict[int, Run]:
    """Train undisturbed, once with each number of ranks."""
    runs = {ranks: train(data, f"twin-{ranks}", ranks) for ranks in (1, 2, 4)}
    for run in runs.values():
        attempt = Attempt(run)
        assert attempt.wait(120) == 0, attempt.text()
    return runs


@pytest.mark.parametrize(("ranks", "rank", "fault"), CASES)
def test_a_rank_fails(data: Path, twins: dict[int, Run], ranks: int, rank: int, fault: str) -> None:
    verdict, reason, reason_alone = FAULTS[fault]
    run = train(data, f"{fault}-{rank}-of-{ranks}", ranks)
    slow = "rank=0,step=9,do=slow,seconds=0.1"  # so that step 8 is on disk by step 13
    attempt = Attempt(run, inject=f"{slow};rank={rank},step=13,do={fault}")
    assert attempt.wait(90) == 1, attempt.text()
    told = attempt.verdict
    assert told["verdict"] == verdict
    assert (reason_alone if ranks == 1 else reason) in told["reason"]
    if ranks > 1:
        assert f"rank {rank}" in told["reason"]
    assert not processes_of(run)
    check_log(attempt, fault, ranks, rank)
    again = Attempt(run, number=1)
    assert again.wait(120) == 0, again.text()
    assert [event["step"] for event in events(run, "resume")] == [8]
    assert losses(run) == losses(twins[ranks])
    assert weights(run, STEPS) == weights(twins[ranks], STEPS)
    assert not left_over(run)


def check_log(attempt: Attempt, fault: str, ranks: int, rank: int) -> None:
    """Nothing that follows from the failure stands above it in the log."""
    text = attempt.text()
    if fault == "raise":
        assert f"first error, on rank {rank}" in text
        before = text[: text.index("InjectedError: asked for")]
        assert "Connection" not in before
        assert "is gone" not in before
    if fault == "stop":
        assert f"rank {rank} on {socket.gethostname()}" in attempt.verdict["reason"]
        assert "after step 12" in attempt.verdict["reason"]
        waiting = {event["rank"] for event in events(attempt.run, "hang")}
        assert waiting == set(range(ranks)) - {rank}
        assert "All its Python stacks" in text


@pytest.mark.parametrize(("fault", "why"), [("sleep", "still in its own share of the step"), ("gil", "silent since")])
def test_a_rank_that_hangs_without_being_stopped(data: Path, fault: str, why: str) -> None:
    run = train(data, f"hangs-{fault}", 2)
    attempt = Attempt(run, inject=f"rank=1,step=5,do={fault}")
    assert attempt.wait(90) == 1
    assert attempt.verdict["verdict"] == "hang"
    assert attempt.verdict["reason"].startswith("hang: rank 1 on")
    assert why in attempt.verdict["reason"]
    assert "_backward" in attempt.text()
    assert not processes_of(run)


@pytest.mark.parametrize("how", ["raise ImportError('no such library')", "os.kill(os.getpid(), 9)"])
def test_a_rank_that_dies_while_it_imports_is_no_stop(data: Path, how: str) -> None:
    """torchrun sends SIGTERM to the ranks that are left: they must not take it for somebody's wish."""
    run = train(data, f"imports-{len(how)}", 2)
    module = run.snapshot / "pipeline" / "lm" / "shards.py"
    module.write_text(f"{module.read_text()}\nimport os\nif os.environ['RANK'] == '1':\n    {how}\n")
    attempt = Attempt(run)
    assert attempt.wait(90) == 1, attempt.text()
    assert attempt.verdict["verdict"] == "crash"
    assert not processes_of(run)


def test_a_slow_rank_is_named(data: Path) -> None:
    run = train(data, "slow", 2, "pretrain.log_interval=2")
    assert Attempt(run, inject="rank=1,step=1,do=slow,seconds=0.1").wait() == 0
    named = events(run, "straggler")
    assert {event["rank"] for event in named} == {1}
    assert named[0]["rank_host"]
