"""A compiled Run that is killed goes on exactly, with the compiler's cache and without it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from by_hand import Attempt, events, losses, make_data, make_run, processes_of, weights

from pipeline.lm.hardware import missing_for_compiler

STEPS = 20
KEYS = (
    f"pretrain.max_steps={STEPS}",
    "pretrain.save_interval=8",
    "pretrain.compile=true",
    "pretrain.loss_chunk_size=48",
)
pytestmark = pytest.mark.skipif(missing_for_compiler() is not None, reason="torch.compile finds no compiler here")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    return make_data(tmp_path_factory.mktemp("compiled"), corpus)


@pytest.mark.parametrize("cache", ["kept", "lost"])
def test_a_compiled_run_goes_on_exactly(data: Path, cache: str) -> None:
    twin = make_run(data, f"twin-{cache}", *KEYS)
    attempt = Attempt(twin)
    assert attempt.wait(300) == 0, attempt.text()
    run = make_run(data, f"killed-{cache}", *KEYS)
    killed = Attempt(run, inject="rank=0,step=9,do=slow,seconds=0.3;rank=0,step=13,do=kill")
    assert killed.wait(300) != 0
    assert (run.compile_cache / "whole").is_file()
    if cache == "lost":
        shutil.rmtree(run.compile_cache)
    again = Attempt(run, number=1)
    assert again.wait(300) == 0, again.text()
    assert [event["step"] for event in events(run, "resume")] == [8]
    assert losses(run) == losses(twin)
    assert weights(run, STEPS) == weights(twin, STEPS)
    assert not processes_of(run)
