"""The disk is full, over quota, read-only or gone while it trains: exit 4, what was saved stays, no training without saves."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from by_hand import Attempt, events, left_over, losses, make_data, make_run, processes_of, wait_for, weights

from pipeline.files import read_lines
from pipeline.lm.checkpoint import verify
from pipeline.run.folder import Run

STEPS = 60
KEYS = (f"pretrain.max_steps={STEPS}", "pretrain.save_interval=10")
SLOW = "rank=0,step=1,do=slow,seconds=0.1;rank=1,step=1,do=slow,seconds=0.1"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    return make_data(tmp_path_factory.mktemp("storage"), corpus)


@pytest.fixture(scope="module")
def twins(data: Path) -> dict[int, Run]:
    runs = {ranks: make_run(data, f"twin-{ranks}", *KEYS, f"pretrain.nproc_per_node={ranks}") for ranks in (1, 2)}
    assert [Attempt(run).wait(120) for run in runs.values()] == [0, 0]
    return runs


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a small file system."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("a small file system cannot be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def fill(folder: Path) -> Path:
    """Take all the space that is left."""
    path = folder / "other"
    with path.open("ab", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            return path
    raise AssertionError("the disk was not full")


def ends_with_exit_4(attempt: Attempt, kept: list[int]) -> None:
    run = attempt.run
    assert attempt.wait(60) == 4, attempt.text()
    assert run.checkpoint_steps() == kept
    for step in kept:
        verify(run.checkpoint(step))
    assert not list(run.checkpoints.glob(".*"))
    assert read_lines(run.metrics)[-1]["step"] < kept[-1] + 20  # it did not go on without saves
    assert not processes_of(run)


def goes_on(run: Run, twin: Run) -> None:
    again = Attempt(run, number=1)
    assert again.wait(120) == 0, again.text()
    assert losses(run) == losses(twin)
    assert weights(run, STEPS) == weights(twin, STEPS)
    assert not left_over(run)


@pytest.mark.parametrize("ranks", [1, 2])
def test_over_quota(data: Path, twins: dict[int, Run], ranks: int) -> None:
    run = make_run(data, f"quota-{ranks}", *KEYS, f"pretrain.nproc_per_node={ranks}")
    attempt = Attempt(run, inject=f"{SLOW};rank=0,step=30,do=quota")
    ends_with_exit_4(attempt, [0, 10, 20])
    assert attempt.verdict["verdict"] == "storage"
    assert "quota" in attempt.verdict["reason"]
    goes_on(run, twins[ranks])


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_folder_is_moved_away_between_saves(data: Path, twins: dict[int, Run], ranks: int) -> None:
    run = make_run(data, f"moved-{ranks}", *KEYS, f"pretrain.nproc_per_node={ranks}")
    attempt = Attempt(run, inject=SLOW)
    wait_for(lambda: run.checkpoint_steps()[-1:] == [10], 60, attempt)
    aside = run.root / "aside"
    run.checkpoints.rename(aside)
    assert attempt.wait(60) == 4, attempt.text()
    assert attempt.verdict["verdict"] == "storage"
    assert "it is gone, with the checkpoints in it" in attempt.verdict["reason"]
    assert not run.checkpoints.exists()
    assert read_lines(run.metrics)[-1]["step"] < 30
    aside.rename(run.checkpoints)
    goes_on(run, twins[ranks])


def test_the_file_system_turns_read_only(data: Path, twins: dict[int, Run], disk: Path) -> None:
    run = make_run(data, "read-only", *KEYS)
    run.checkpoints.symlink_to(disk)
    attempt = Attempt(run, inject=SLOW)
    wait_for(lambda: run.checkpoint_steps()[-1:] == [10], 60, attempt)
    remount(disk, "ro")
    ends_with_exit_4(attempt, [0, 10])
    assert attempt.verdict["verdict"] == "storage"
    remount(disk, "rw")
    goes_on(run, twins[1])


def remount(disk: Path, mode: str) -> None:
    """Turn a file system read-only or back, between two writes of a save."""
    deadline = time.monotonic() + 20
    while subprocess.run(["mount", "-o", f"remount,{mode}", disk], check=False, capture_output=True).returncode:
        assert time.monotonic() < deadline


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_disk_of_the_checkpoints_is_full(data: Path, twins: dict[int, Run], disk: Path, ranks: int) -> None:
    run = make_run(data, f"full-{ranks}", *KEYS, f"pretrain.nproc_per_node={ranks}")
    run.checkpoints.symlink_to(disk)
    attempt = Attempt(run, inject=SLOW)
    wait_for(lambda: run.checkpoint_steps()[-1:] == [10], 60, attempt)
    other = fill(disk)
    ends_with_exit_4(attempt, [0, 10])
    assert attempt.verdict["verdict"] == "storage"
    assert "MB are free" in attempt.verdict["reason"]
    other.unlink()
    goes_on(run, twins[ranks])


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_disk_of_everything_is_full(data: Path, twins: dict[int, Run], disk: Path, ranks: int) -> None:
    """Neither metrics nor log nor verdict can be written; the exit code is left to tell."""
    (disk / "runs").mkdir()
    run = make_run(data, f"all-{ranks}", *KEYS, f"pretrain.nproc_per_node={ranks}", f"runs_dir={disk / 'runs'}")
    attempt = Attempt(run, inject=SLOW)
    wait_for(lambda: run.checkpoint_steps()[-1:] == [10], 60, attempt)
    other = fill(disk)
    assert attempt.wait(60) == 4
    assert not processes_of(run)
    steps = run.checkpoint_steps()
    other.unlink()
    for step in steps:
        verify(run.checkpoint(step))
    goes_on(run, twins[ranks])
    assert [event["step"] for event in events(run, "resume")] == [steps[-1]]


NO_LOCKS = """
#include <errno.h>
int flock(int fd, int operation) { errno = ENOLCK; return -1; }
int lockf(int fd, int operation, long length) { errno = ENOLCK; return -1; }
"""


def test_on_a_file_system_without_locks(data: Path, twins: dict[int, Run], tmp_path: Path) -> None:
    """Ownership is made of link() alone: two scripts at once, and one trains."""
    source, library = tmp_path / "no_locks.c", tmp_path / "no_locks.so"
    source.write_text(NO_LOCKS)
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to make flock() fail")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    run = make_run(data, "no-locks", *KEYS)
    attempts = [Attempt(run, number=number, LD_PRELOAD=str(library)) for number in range(2)]
    assert [attempt.wait(120) for attempt in attempts] == [0, 0]  # one waits, and finds all done
    assert len(events(run, "resume")) == 1
    assert losses(run) == losses(twins[1])
    assert weights(run, STEPS) == weights(twins[1], STEPS)
