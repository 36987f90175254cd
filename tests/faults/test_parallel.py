"""Sharded training (FSDP2, also within nodes only) is the replicated one: same losses, same checkpoints, exact resume."""

from __future__ import annotations

from pathlib import Path

import parallel_ranks
import pytest
import torch
from by_hand import Attempt, events, losses, make_data, make_run, processes_of, weights
from rank_processes import run_ranks

STEPS = 24
KEYS = (
    f"pretrain.max_steps={STEPS}",
    "pretrain.save_interval=8",
    "pretrain.nproc_per_node=2",
    "pretrain.parallel=fsdp",
)


def test_two_four_and_one_rank(tmp_path: Path) -> None:
    """The ranks compare sharded with replicated training; four and one go on from what two have saved."""
    parallel_ranks.begin_alone(tmp_path)
    run_ranks("parallel_ranks.py", 2, tmp_path, seconds=300)
    run_ranks("parallel_ranks.py", 4, tmp_path, seconds=300)
    torch.set_num_threads(1)
    parallel_ranks.loads_elsewhere(tmp_path, ("ddp",))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    return make_data(tmp_path_factory.mktemp("parallel"), corpus)


@pytest.mark.parametrize("fault", ["kill", "nan_grad"])
def test_a_sharded_run_that_fails_goes_on_exactly(data: Path, fault: str) -> None:
    twin = make_run(data, f"twin-{fault}", *KEYS)
    attempt = Attempt(twin)
    assert attempt.wait(120) == 0, attempt.text()
    run = make_run(data, f"fails-{fault}", *KEYS)
    slow = "rank=0,step=9,do=slow,seconds=0.1"  # so that step 8 is on disk by step 13
    failed = Attempt(run, inject=f"{slow};rank=1,step=13,do={fault}")
    assert failed.wait(90) == (1 if fault == "kill" else 5), failed.text()
    assert failed.verdict["verdict"] == ("crash" if fault == "kill" else "diverged")
    again = Attempt(run, number=1)
    assert again.wait(120) == 0, again.text()
    assert [event["step"] for event in events(run, "resume")] == [8]
    assert losses(run) == losses(twin)
    assert weights(run, STEPS) == weights(twin, STEPS)
    assert not processes_of(run)
