"""A process that was stopped, as a suspended Job's are, has not used up its time; one whose interpreter is held is ended."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import PROJECT, environment

from pipeline.lm import awake
from pipeline.lm.awake import AwakeClock
from pipeline.lm.saver import Saver

RANK = """
import os, socket, sys, time
from pipeline.lm import watchdog
from pipeline.lm.watchdog import Around, Rank, Watchdog
watchdog.INTERPRETER_SECONDS = 1.0
def end(verdict, reason, step):
    print(verdict, reason, flush=True)
    os._exit(7)
around = Around(
    is_alive=lambda rank: True, stop_reason=lambda: None, said=lambda: None,
    event=lambda kind, **details: print("event", kind, flush=True), hangs=lambda: [], end=end,
)
dog = Watchdog(Rank(0, socket.gethostname(), os.getpid(), None), around, 3.0, 3.0)
dog.start()
print("ready", flush=True)
"""
WORKS = RANK + "for _ in range(4):\n    time.sleep(1)\n    dog.beat(1)\ndog.close()\nprint('done', flush=True)\n"
KEEPS = RANK + "import ctypes\nctypes.PyDLL(None).sleep(100)\n"
HANGS = RANK + "time.sleep(100)\n"


class Clock:
    """Time as a test wants it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(awake, "time", made)
    return made


def test_time_between_ticks_counts_and_a_long_stop_does_not(clock: Clock) -> None:
    lived = AwakeClock()
    clock.now += 20
    assert lived() == 20  # before anything ticks it is any clock
    lived.tick()
    clock.now += 3
    assert lived() == 23
    assert lived.tick() == 0
    clock.now += 3600
    assert lived() <= 23 + awake.LONGEST  # also before the tick has seen the stop
    assert lived.tick() == pytest.approx(3600 - awake.USUAL)
    assert lived() == 23 + awake.USUAL
    lived.stop()
    clock.now += 60
    assert lived() == 23 + awake.USUAL + 60


def test_a_save_during_a_stop_does_not_hang(tmp_path: Path, clock: Clock) -> None:
    lived = AwakeClock()
    lived.tick()
    saver = Saver(tmp_path, {}, limit=30, clock=lived)
    saver._start(lambda: time.sleep(0.3))
    clock.now += 3600
    saver.poll()
    saver.wait()


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()


def start(script: str, started: list[subprocess.Popen[str]]) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=environment(PYTHONPATH=str(PROJECT)),
    )  # fmt: skip
    started.append(process)
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], 60)[0]
    assert process.stdout.readline() == "ready\n"
    return process


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("all_of_it", [True, False])
def test_a_rank_that_is_suspended_for_longer_than_its_limit_goes_on(
    started: list[subprocess.Popen[str]], all_of_it: bool
) -> None:
    process = start(WORKS, started)
    stopped = [process.pid, *(children(process.pid) if all_of_it else [])]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(9)  # longer than the limit, and than what the interpreter may be kept
    for pid in reversed(stopped):
        os.kill(pid, signal.SIGCONT)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 0, text
    assert text.endswith("done\n")
    assert "event was stopped" in text


def test_a_rank_that_hangs_is_ended(started: list[subprocess.Popen[str]]) -> None:
    process = start(HANGS, started)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 7, text
    assert "hang" in text


def test_a_rank_whose_interpreter_is_kept_is_ended_with_its_stacks(started: list[subprocess.Popen[str]]) -> None:
    process = start(KEEPS, started)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGABRT, text
    assert "HangError: no thread of Python has run" in text
    assert 'File "<string>"' in text


def test_nothing_is_left_of_a_rank_that_is_killed(started: list[subprocess.Popen[str]]) -> None:
    process = start(HANGS, started)
    (fuse,) = children(process.pid)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{fuse}/stat").exists() and Path(f"/proc/{fuse}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.05)
