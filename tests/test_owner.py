"""One owner at a time, also after owners that were killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import environment

from pipeline.errors import NotReadyError
from pipeline.run import owner
from pipeline.run.owner import (
    NotOwnerError,
    check_owner,
    is_alive,
    owned,
    process_start,
    take,
    this_process,
    try_to_own,
)

HOLD = """
import sys, time
from pathlib import Path
from pipeline.run.owner import try_to_own
holder = try_to_own(Path(sys.argv[1]))
print("held" if holder else "owned", flush=True)
if holder is None:
    time.sleep(60)
"""


def contender(path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True, env=environment()
    )


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_living_owner_is_respected_and_a_dead_one_replaced(tmp_path: Path) -> None:
    path = tmp_path / "owner.json"
    other = contender(path)
    assert first_line(other) == "owned"
    with pytest.raises(NotReadyError, match=f"held by process {other.pid}"), owned(path, "Run x"):
        pass
    other.kill()
    other.wait()
    with owned(path, "Run x"):
        assert json.loads(path.read_text())["pid"] == os.getpid()
    assert not path.exists()


def test_of_many_racers_for_a_dead_owners_place_one_wins(tmp_path: Path) -> None:
    path = tmp_path / "owner.json"
    path.write_text(json.dumps(this_process() | {"pid": 2**22 - 3}))
    racers = [contender(path) for _ in range(8)]
    results = sorted(first_line(racer) for racer in racers)
    for racer in racers:
        racer.kill()
        racer.wait()
    assert results == ["held"] * 7 + ["owned"]


def test_a_reused_pid_is_another_process() -> None:
    assert is_alive(this_process())
    assert not is_alive(this_process() | {"started": "1"})


def test_an_owner_on_another_host_is_taken_to_live() -> None:
    assert is_alive({"host": "elsewhere", "pid": 1, "started": "1"})


ELSEWHERE = {"host": "login2", "pid": 4711, "started": "1"}


def held_elsewhere(path: Path, age: float, **details: object) -> Path:
    """Let a call on another login node hold `path`; its last sign of life was `age` seconds ago. Return its claim."""
    path.parent.mkdir(parents=True, exist_ok=True)
    assert owner.link_claim(path, 7, ELSEWHERE | {"token": "x"} | details)
    claim = owner.claim_path(path, 7)
    os.utime(claim, (time.time() - age,) * 2)
    return claim


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(owner, "WATCH_SECONDS", 0.3)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("age", [3600, -3600], ids=["long ago", "by a clock that is ahead"])
def test_a_call_that_was_killed_on_another_host_is_followed_after_a_while(tmp_path: Path, age: float) -> None:
    path = tmp_path / "run" / "control" / "scheduler.json"
    held_elsewhere(path, age, beats=True)
    with owned(path, "Run x"):
        assert json.loads(path.read_text())["pid"] == os.getpid()


@pytest.mark.usefixtures("impatient")
def test_a_call_that_lives_on_another_host_is_respected_whatever_its_clock_says(tmp_path: Path) -> None:
    path = tmp_path / "run" / "control" / "scheduler.json"
    claim = held_elsewhere(path, 3600, beats=True)
    beat = threading.Thread(target=lambda: [(time.sleep(0.05), os.utime(claim, (n, n))) for n in range(1, 20)])
    beat.start()
    with pytest.raises(NotReadyError, match="held by process 4711 on login2"), owned(path, "Run x"):
        pass
    beat.join()


def test_a_call_that_lately_gave_a_sign_of_life_is_respected_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run" / "control" / "scheduler.json"
    held_elsewhere(path, 30, beats=True)
    with (
        pytest.raises(NotReadyError, match=r"(?s)free 120 s after its last sign of life.*owner free"),
        owned(path, "Run x"),
    ):
        pass


@pytest.mark.usefixtures("impatient")
def test_an_owner_gives_signs_of_life(tmp_path: Path) -> None:
    path = tmp_path / "scheduler.json"
    with owned(path, "Run x"):
        claim = owner.claim_path(path, 1)
        os.utime(claim, (1, 1))
        deadline = time.monotonic() + 20
        while claim.stat().st_mtime == 1:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_the_remedy_for_an_owner_that_never_gives_a_sign_is_a_command_that_works(tmp_path: Path) -> None:
    path = tmp_path / "run" / "control" / "scheduler.json"
    held_elsewhere(path, 3600)
    with pytest.raises(NotReadyError) as refused, owned(path, "Run x"):
        pass
    line = str(refused.value).splitlines()[-1].strip()
    freed = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, env=environment(), check=True, timeout=60
    )
    assert "process 4711 on login2" in freed.stderr
    with owned(path, "Run x"):
        pass


def test_an_owner_that_lives_here_is_not_freed(tmp_path: Path) -> None:
    path = tmp_path / "run" / "control" / "scheduler.json"
    other = contender(path)
    assert first_line(other) == "owned"
    with pytest.raises(NotReadyError, match=f"kill {other.pid}"):
        owner.free(path)
    other.kill()
    other.wait()


def test_a_torn_record_is_no_owner(tmp_path: Path) -> None:
    path = tmp_path / "owner.json"
    path.write_text('{"pid": 1')
    assert try_to_own(path) is None


def test_a_zombie_is_gone() -> None:
    child = subprocess.Popen(["true"])
    time.sleep(0.2)
    assert process_start(child.pid) is None
    child.wait()


def test_a_taken_over_owner_notices_and_only_the_named_attempt_follows(tmp_path: Path) -> None:
    path = tmp_path / "owner.json"
    assert try_to_own(path, job_id="7", attempt=0) is None
    check_owner(path)
    former = take(path, "7", 1)
    assert former is not None
    assert former["pid"] == os.getpid()
    with pytest.raises(NotOwnerError, match="reserved"):
        check_owner(path)
    assert try_to_own(path, job_id="8", attempt=0) is not None
    assert try_to_own(path, job_id="7", attempt=1) is None
    check_owner(path)


def test_a_hundred_racing_starts_have_one_owner(tmp_path: Path) -> None:
    path = tmp_path / "owner.json"
    path.write_text(json.dumps(this_process() | {"pid": 2**22 - 3}))
    children = []
    for _ in range(100):  # forked: a hundred interpreters would take a minute
        pid = os.fork()
        if pid == 0:
            code = 0 if try_to_own(path) is None else 1
            (tmp_path / f"tried-{os.getpid()}").touch()
            while len(list(tmp_path.glob("tried-*"))) < 100:  # an owner that ended could be followed
                time.sleep(0.01)
            os._exit(code)
        children.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    assert codes.count(0) == 1
