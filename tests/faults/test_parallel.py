"""Sharded training (FSDP2, also within nodes only) is the replicated one: same losses, same checkpoints, exact resume."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import parallel_ranks
import pytest
import torch
from by_hand import Attempt, events, losses, make_data, make_run, processes_of, weights
from conftest import PROJECT, environment

STEPS = 24
KEYS = (
    f"pretrain.max_steps={STEPS}",
    "pretrain.save_interval=8",
    "pretrain.nproc_per_node=2",
    "pretrain.parallel=fsdp",
)


def run_ranks(world_size: int, root: Path) -> None:
    command = [sys.executable, str(PROJECT / "tests" / "parallel_ranks.py"), str(root / f"store{world_size}")]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(world_size), str(root)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, env=environment(PYTHONPATH=str(PROJECT)),
        )
        for rank in range(world_size)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * world_size, "\n".join(outputs)


def test_two_four_and_one_rank(tmp_path: Path) -> None:
    """The ranks compare sharded with replicated training; four and one go on from what two have saved."""
    run_ranks(2, tmp_path)
    run_ranks(4, tmp_path)
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
