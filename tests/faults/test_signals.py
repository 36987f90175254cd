"""Each stop signal, to each process, in each phase: one save, a clean end, nothing lost, nobody left."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from by_hand import (
    Attempt,
    events,
    launcher_of,
    left_over,
    losses,
    make_data,
    make_run,
    processes_of,
    ranks_of,
    wait_for,
    weights,
)

from pipeline.files import read_json
from pipeline.lm.checkpoint import verify
from pipeline.run.folder import Run

STEPS = 20
KEYS = (f"pretrain.max_steps={STEPS}", "pretrain.nproc_per_node=2", "pretrain.save_interval=10")
SIGNALS = ("TERM", "INT", "HUP", "QUIT", "USR2")
WHOM = ("script", "torchrun", "rank", "all")


@dataclass(frozen=True)
class Phase:
    """A moment of training: what holds it up, how it is recognized, and the exit code and checkpoints that follow."""

    inject: str
    now: Callable[[Run], bool]
    ends: int
    saved: Callable[[list[int]], bool]


def is_injected(run: Run, step: int) -> bool:
    return any(event["step"] == step for event in events(run, "fault"))


def is_saving(run: Run, step: int) -> bool:
    return any(run.checkpoints.glob(f".step-{step:08}.*.tmp"))


PHASES = {
    "import": Phase("", lambda run: len(ranks_of(run)) == 2, 75, lambda steps: steps == []),
    "first batch": Phase(
        "rank=1,step=1,do=sleep,seconds=2", lambda run: is_injected(run, 1), 75, lambda steps: steps == [0, 1]
    ),
    "mid-step": Phase(
        "rank=1,step=13,do=sleep,seconds=2", lambda run: is_injected(run, 13), 75, lambda steps: steps == [0, 10, 13]
    ),
    "mid-save": Phase(
        "rank=0,step=10,do=slow_save,seconds=2;rank=0,step=12,do=sleep,seconds=1",
        lambda run: is_saving(run, 10), 75, lambda steps: steps[:2] == [0, 10] and len(steps) <= 3,
    ),
    "after the last step": Phase(
        f"rank=0,step={STEPS},do=slow_save,seconds=2", lambda run: is_saving(run, STEPS), 0,
        lambda steps: steps == [0, 10, STEPS],
    ),
}  # fmt: skip
# Every signal meets every phase and every process, every process every phase.
CASES = [
    (name, phase, WHOM[(place + number) % len(WHOM)])
    for number, name in enumerate(SIGNALS)
    for place, phase in enumerate(PHASES)
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    return make_data(tmp_path_factory.mktemp("signals"), corpus)


@pytest.fixture(scope="module")
def twin(data: Path) -> Run:
    run = make_run(data, "twin", *KEYS)
    assert Attempt(run).wait(120) == 0
    for stage in ("evaluate", "inference"):
        assert Attempt(run, stage=stage, job=stage).wait(120) == 0
    return run


def send(attempt: Attempt, name: str, whom: str) -> None:
    """Send a signal twice; the second may come when all is over."""
    run, number = attempt.run, signal.Signals[f"SIG{name}"]
    ranks = ranks_of(run)
    pids = {
        "script": lambda: [attempt.process.pid], "torchrun": lambda: [launcher_of(run)],
        "rank": lambda: [ranks[max(ranks)]], "all": lambda: [attempt.process.pid, *processes_of(run)],
    }[whom]()  # fmt: skip
    for _ in range(2):
        for pid in dict.fromkeys(pids):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        time.sleep(0.05)


@pytest.mark.parametrize(("name", "phase", "whom"), CASES)
def test_a_signal_saves_once_and_ends(data: Path, twin: Run, name: str, phase: str, whom: str) -> None:
    wanted = PHASES[phase]
    run = make_run(data, f"{name}-{phase.replace(' ', '-')}-{whom}", *KEYS)
    attempt = Attempt(run, inject=wanted.inject)
    wait_for(lambda: wanted.now(run), 60, attempt)
    if phase == "import":
        time.sleep(0.5)  # until its handlers are there; torch takes longer
    send(attempt, name, whom)
    assert attempt.wait(90) == wanted.ends, attempt.text()
    assert attempt.verdict["verdict"] == ("stopped" if wanted.ends else "complete")
    assert not left_over(run)
    steps = run.checkpoint_steps()
    assert wanted.saved(steps), steps
    for step in steps:
        verify(run.checkpoint(step))
    assert [event["step"] for event in events(run, "save")] == steps
    if phase == "mid-save":
        assert Attempt(run, number=1).wait(120) == 0
        assert losses(run) == losses(twin)
        assert weights(run, STEPS) == weights(twin, STEPS)


@pytest.mark.parametrize("whom", ["script", "rank"])
def test_a_signal_while_it_compiles(data: Path, whom: str) -> None:
    """Nothing is in memory that is not on disk, so nobody waits for the compiler."""
    run = make_run(data, f"compiles-{whom}", *KEYS, "pretrain.compile=true")
    attempt = Attempt(run)
    wait_for(lambda: run.checkpoint_steps() == [0] and (run.root / "cache" / "inductor").exists(), 120, attempt)
    send(attempt, "TERM", whom)
    assert attempt.wait(90) == 75, attempt.text()
    assert run.checkpoint_steps()[0] == 0
    assert not processes_of(run)


@pytest.mark.parametrize("stage", ["evaluate", "inference"])
@pytest.mark.parametrize(
    ("name", "whom"), [("TERM", "script"), ("INT", "rank"), ("QUIT", "all"), ("USR2", "script"), ("HUP", "rank")]
)
def test_a_signal_to_a_stage_that_has_nothing_to_save(
    twin: Run, tmp_path: Path, stage: str, name: str, whom: str
) -> None:
    run = Run(tmp_path / f"{twin.name}-{name}")
    copy_run(twin, run)
    before = outputs(twin, stage)
    shutil.rmtree(run.root / {"evaluate": "scores", "inference": "samples"}[stage])
    attempt = Attempt(run, stage=stage, job=stage)
    wait_for(lambda: events(run, "start")[-1:] and events(run, "start")[-1]["stage"] == stage, 60, attempt)
    send(attempt, name, whom)
    assert attempt.wait(60) == 75, attempt.text()
    assert attempt.verdict["verdict"] == "stopped"
    assert not processes_of(run)
    assert Attempt(run, number=1, stage=stage, job=stage).wait(120) == 0
    assert outputs(run, stage) == before


def copy_run(run: Run, target: Run) -> None:
    """Copy a Run to another folder; its launch files and scripts name the folder."""
    shutil.copytree(run.root, target.root)
    for path in [*target.root.glob("launch/*.env")]:
        path.write_text(path.read_text().replace(f"{run.root}", f"{target.root}"))
    for path in target.root.glob("attempts/*"):
        path.unlink()
    target.events.unlink()


def outputs(run: Run, stage: str) -> list[object]:
    """Return what a stage has made, without the times that it took."""
    if stage == "inference":
        return [line.partition('"seconds"')[0] for path in sorted(run.root.glob("samples/*")) for line in path.open()]
    scores = sorted(run.root.glob("scores/step-*/*.json"))
    return [(path.parent.name, read_json(path)["nll"]) for path in scores]


def test_a_killed_job_script_leaves_no_ranks(data: Path) -> None:
    run = make_run(data, "script", *KEYS, "pretrain.max_steps=5000", "pretrain.save_interval=4000")
    attempt = Attempt(run)
    attempt.wait_for_step(3)
    os.kill(attempt.process.pid, signal.SIGKILL)
    attempt.wait()
    deadline = time.monotonic() + 30
    while processes_of(run):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert attempt.verdict["verdict"] == "stopped"
