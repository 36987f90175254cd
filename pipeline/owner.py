"""One owner at a time: a record on disk that names a process of this machine."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.errors import NotReadyError
from pipeline.files import read_json, write_json


def process_start(pid: int) -> str | None:
    """Return when a process of this machine started (clock ticks since boot), None if it is gone or a zombie.

    With the pid it names a process for good: pids are used again, pairs of pid and start are not.
    """
    try:
        # The command's name, in parentheses, may hold anything; the fields after it are fixed (proc(5)).
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def this_process() -> dict[str, Any]:
    """Describe this process so that another one can tell later whether it still lives."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "started": process_start(os.getpid())}


def is_alive(record: dict[str, Any] | None) -> bool:
    """Tell whether the process of a record lives; one of another host is taken to live, since nobody can look."""
    if not isinstance(record, dict) or "pid" not in record:
        return False
    if record.get("host") != socket.gethostname():
        return True
    start = process_start(int(record["pid"]))
    return start is not None and start == record.get("started", start)


@contextmanager
def _guard(path: Path) -> Iterator[None]:
    """Let one process of this machine at a time look and replace."""
    with open(path.with_name(f".{path.name}.guard"), "a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def try_to_own(path: Path, **details: Any) -> dict[str, Any] | None:
    """Write this process into `path`; if a living process stands there, change nothing and return its record."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _guard(path):
        try:
            holder = read_json(path)
        except json.JSONDecodeError:
            holder = None
        if is_alive(holder) and holder["pid"] != os.getpid():
            return dict(holder)
        write_json(path, this_process() | details)
    return None


def disown(path: Path) -> None:
    """Remove the record if it names this process."""
    with _guard(path):
        holder = read_json(path)
        if holder and holder["pid"] == os.getpid() and holder["host"] == socket.gethostname():
            path.unlink()


@contextmanager
def owned(path: Path, what: str, wait_seconds: float = 0, **details: Any) -> Iterator[None]:
    """Own `path` inside the body; wait up to `wait_seconds` for a former owner that is on its way out."""
    deadline = time.monotonic() + wait_seconds
    while (holder := try_to_own(path, **details)) is not None:
        if time.monotonic() >= deadline:
            raise NotReadyError(f"{what} is held by process {holder['pid']} on {holder['host']} ({path})")
        time.sleep(0.2)
    try:
        yield
    finally:
        disown(path)
