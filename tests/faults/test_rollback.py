"""Batches that spoil the loss or a gradient: back, past them, on to the end; the same when it is killed on the way."""

from __future__ import annotations

from pathlib import Path

import pytest
from by_hand import Attempt, events, left_over, losses, make_data, make_run, processes_of, weights

from pipeline.lm.checkpoint import verify
from pipeline.run.folder import Run

STEPS = 40
KEYS = (
    f"pretrain.max_steps={STEPS}", "pretrain.save_interval=6", "pretrain.nproc_per_node=2",
    "pretrain.on_divergence=rollback", "pretrain.spike_threshold=8", "pretrain.spike_window=8",
)  # fmt: skip
FAULTS = {
    "nan_loss": "rank=1,step=21,do=nan_loss",
    "nan_grad": "rank=0,step=21,do=nan_grad",
    "spike": "rank=0,step=21,do=spike;rank=1,step=21,do=spike",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    return make_data(tmp_path_factory.mktemp("rollback"), corpus)


@pytest.fixture(scope="module")
def twins(data: Path) -> dict[str, Run]:
    """Meet the bad batch, go back and on to the end, without any other trouble."""
    runs = {fault: make_run(data, f"twin-{fault}", *KEYS) for fault in FAULTS}
    for fault, run in runs.items():
        attempt = Attempt(run, inject=FAULTS[fault])
        assert attempt.wait(120) == 0, attempt.text()
    return runs


@pytest.mark.parametrize("killed", [22, 30], ids=["before the next save", "after it"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_rollback_goes_on_to_the_end_killed_or_not(
    data: Path, twins: dict[str, Run], fault: str, killed: int
) -> None:
    twin, run = twins[fault], make_run(data, f"{fault}-{killed}", *KEYS)
    assert [(event["step"], event["skipped"]) for event in events(twin, "rollback")] == [(18, 3)]
    assert [step for step, _ in losses(twin)] == list(range(1, STEPS + 1))
    assert bool(events(twin, "spike")) == (fault == "spike")
    assert Attempt(run, inject=f"{FAULTS[fault]};rank=1,step={killed},do=kill").wait() == 1
    again = Attempt(run, number=1, inject=FAULTS[fault])
    assert again.wait(120) == 0, again.text()
    # Killed before the next save, the rollback itself is lost, and made again.
    assert len(events(run, "rollback")) == (2 if killed == 22 else 1)
    assert losses(run) == losses(twin)
    assert weights(run, STEPS) == weights(twin, STEPS)
    assert not left_over(run)


def test_weights_that_are_spoilt_again_and_again_end_the_run(data: Path) -> None:
    run = make_run(data, "weights", *KEYS, "pretrain.max_rollbacks=2")
    attempt = Attempt(run, inject="rank=0,step=24,do=nan_weight;rank=1,step=24,do=nan_weight")
    assert attempt.wait(120) == 5, attempt.text()
    assert attempt.verdict["verdict"] == "diverged"
    assert len(events(run, "rollback")) == 2
    assert run.checkpoint_steps() == [0, 6, 12, 18]
    verify(run.checkpoint(18))
    assert not processes_of(run)
