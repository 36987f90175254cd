"""The names of checkpoint folders. `checkpoints/step-00000200/` is whole when its manifest, written last, is there."""

from __future__ import annotations

import os
import re
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pipeline.files import read_object, write_json

MANIFEST = "manifest.json"
PINNED = "pinned"  # an empty file in a checkpoint that retention leaves alone
STEP_FOLDER = re.compile(r"step-(\d{8,})")


def step_name(step: int) -> str:
    """Name the folder of a step; eight digits, so that names sort like numbers for a while."""
    return f"step-{step:08d}"


def step_folders(folder: Path) -> dict[int, Path]:
    """Return the folders of steps, whole or not, in the order of numbers.

    A file of such a name, a link that leads nowhere, or a name with other digits is somebody else's: passed over.
    """
    try:
        entries = list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    found = {
        int(match[1]): entry
        for entry in entries
        if (match := STEP_FOLDER.fullmatch(entry.name)) and entry.name == step_name(int(match[1])) and entry.is_dir()
    }
    return dict(sorted(found.items()))


def list_steps(folder: Path) -> list[int]:
    """List the steps that have a folder with a manifest, in the order of numbers."""
    return [step for step, entry in step_folders(folder).items() if (entry / MANIFEST).is_file()]


# Readers: who reads a checkpoint holds a lease of it, and retention leaves it alone until that has expired.

READERS = ".readers"  # a folder beside the checkpoints: step-00000200.HOST.PID.NONCE, {"until": unix s}
LEASE_SECONDS = 3600.0


class Lease:
    """A promise of retention to leave a checkpoint alone for a while; where none can be written, there is none."""

    def __init__(self, checkpoint: Path, seconds: float = LEASE_SECONDS) -> None:
        name = f"{checkpoint.name}.{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}"
        self.path, self.seconds, self.written = checkpoint.parent / READERS / name, seconds, 0.0

    def renew(self) -> None:
        """Let it run from now on again; called as often as one likes."""
        now = time.time()
        if now - self.written < self.seconds / 4:
            return
        with suppress(OSError):  # a disk that is full, or somebody else's Run
            if self.path.parent.parent.is_dir():
                self.path.parent.mkdir(exist_ok=True)
                write_json(self.path, {"until": now + self.seconds}, durable=False)
                self.written = now

    def end(self) -> None:
        with suppress(OSError):
            self.path.unlink(missing_ok=True)
            self.path.parent.rmdir()  # where it was the last one


@contextmanager
def reading(checkpoint: Path, seconds: float = LEASE_SECONDS) -> Iterator[Lease]:
    """Keep retention from a checkpoint inside the body. Look for the checkpoint inside it, not before."""
    lease = Lease(checkpoint, seconds)
    lease.renew()
    try:
        yield lease
    finally:
        lease.end()


def leased_steps(folder: Path) -> set[int]:
    """Return the steps that someone reads now; leases that have expired are removed."""
    steps = set()
    for path in (folder / READERS).glob("step-*"):
        match = STEP_FOLDER.match(path.name)
        if match is None:
            continue
        if _expires(path) > time.time():
            steps.add(int(match[1]))
        else:
            with suppress(OSError):
                path.unlink(missing_ok=True)
    return steps


def _expires(lease: Path) -> float:
    """Return when a lease ends (unix s); one that is torn, as if it had just been written."""
    try:
        return float(read_object(lease)["until"])
    except (ValueError, TypeError, KeyError):
        with suppress(OSError):
            return lease.stat().st_mtime + LEASE_SECONDS
    except OSError:
        pass
    return 0.0
