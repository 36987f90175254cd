"""Saves in the background: the training thread copies, another thread writes, hashes and renames.

A folder appears under its name when all that is in it is on disk. Ranks meet by files in the temporary folder, never by
collectives: those belong to the training thread, and would hang with a rank that has died.
"""

from __future__ import annotations

import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from pipeline.errors import DivergedError, StorageError, UserError
from pipeline.files import TornError, fsync_folder, read_object, sha256_file, write_json
from pipeline.lm.contents import FORMAT, TENSORS, Contents, seal
from pipeline.lm.finite import not_finite
from pipeline.lm.staging import aside, sha256, write_durably
from pipeline.lm.state import GROUPS, training_state
from pipeline.lm.storage import Staged, Stager
from pipeline.run.steps import MANIFEST, step_name

MARGIN = 16 * 2**20  # bytes to leave free: metrics and events go on being written
LIMIT = 1800.0  # seconds that a save may be in flight before it counts as hanging
LEAVE = 60.0  # seconds that a process which ends by an error waits for its save
POLL = 0.02  # seconds between looks for the other ranks' records


@dataclass(frozen=True)
class Saved:
    """One checkpoint that is on disk."""

    path: Path
    step: int
    bytes: int
    stall_seconds: float  # in which training waited
    seconds: float  # until it was durable


@dataclass(frozen=True)
class Hooks:
    """What else happens around a save, on rank 0, in the background thread."""

    before_publish: Callable[[], None] = lambda: None  # raises if this process may no longer write to the Run
    on_saved: Callable[[Saved], None] = lambda saved: None


NO_HOOKS = Hooks()


class Saver:
    """Saves checkpoints into a folder, one at a time. Use it as a context: leaving waits for the save in flight."""

    def __init__(
        self,
        folder: Path,
        about: dict[str, Any],
        hooks: Hooks = NO_HOOKS,
        *,
        limit: float = LIMIT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`about` goes into every manifest as it is; `limit` seconds of `clock` may pass for a save."""
        self.folder, self.about, self.hooks, self.limit, self.clock = folder, about, hooks, limit, clock
        self.newest: int | None = None  # step of the last save, in flight or on disk
        self.rank, self.world_size = _rank(), _world_size()
        self.stager = Stager()
        self.thread: threading.Thread | None = None
        self.failure: BaseException | None = None
        self.started = 0.0

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.wait()
            return
        try:  # the first error is the one to be shown
            self.wait(LEAVE)
        except Exception as error:
            print(f"the last save failed too: {error}")

    def reserve(self, size: int) -> None:
        """Make the buffer ready, in the background, for saves of `size` bytes by this rank."""
        self.wait()
        self._start(lambda: self.stager.buffer.touch(size))

    def save(self, step: int, model: nn.Module, optimizers: list[Optimizer], progress: dict[str, int]) -> None:
        """Save step-N; all ranks call it. Return when model and optimizers may change again.

        Waits for the save before, and raises if that one failed. `progress` are integers such as the tokens seen.
        """
        self.wait()
        started = time.monotonic()
        tensors, groups = training_state(model, optimizers)
        staged = self.stager.stage(tensors)
        expected = self.newest is not None  # there are checkpoints in the folder
        self.newest, stall = step, time.monotonic() - started
        values = {"progress": progress, GROUPS: groups}

        def work() -> None:
            path = self._write(step, staged, values, expected)
            if path is not None:
                seconds = time.monotonic() - started
                self.hooks.on_saved(Saved(path, step, staged.total_bytes, stall, seconds))

        self._start(work)

    def poll(self) -> None:
        """Raise if the save in flight has failed or hangs; called at every step."""
        if self.thread is None:
            return
        if not self.thread.is_alive():
            self.wait()
        elif self.clock() - self.started > self.limit:
            self.wait(0)

    def wait(self, seconds: float | None = None) -> None:
        """Wait until nothing is in flight; raise what made the save fail, once."""
        if self.thread is None:
            return
        deadline = self.started + self.limit if seconds is None else self.clock() + seconds
        while self.thread.is_alive() and (left := deadline - self.clock()) > 0:
            self.thread.join(min(left, 1.0))  # not all at once: the clock may stand still
        if self.thread.is_alive():
            waited = self.clock() - self.started
            raise StorageError(f"{self.folder}: the save of step {self.newest} hangs, for {waited:.0f} s by now")
        self.thread, failure, self.failure = None, self.failure, None
        if failure is not None:
            raise failure

    def _start(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except UserError as error:
                self.failure = error
            except OSError as error:
                self.failure = StorageError(
                    f"{self.folder}: a save failed: {error}; the checkpoints before it are whole. "
                    "Free space or mend the file system, then resume"
                )
            except BaseException as error:
                self.failure = error

        self.started = self.clock()
        # A daemon, so that a hanging disk cannot keep a process from ending.
        self.thread = threading.Thread(target=run, name="checkpoint writer", daemon=True)
        self.thread.start()

    def _write(self, step: int, staged: Staged, values: dict[str, Any], expected: bool) -> Path | None:
        """Write this rank's file, then on rank 0 the rest; return the checkpoint there."""
        name = f".{step_name(step)}.{staged.nonce}.tmp"
        temporary = self.folder / name
        if self.rank != 0:
            self._wait_for(temporary.is_dir, f"{temporary}: rank 0 has not made it")
            record = _write_rank_file(temporary, staged)
            write_json(temporary / _record_name(self.rank), record)
            _raise_if_failed(record)
            return None
        try:
            if not expected:
                self.folder.mkdir(parents=True, exist_ok=True)
            elif not self.folder.is_dir():
                raise StorageError(f"{self.folder}: it is gone, with the checkpoints in it; put it back, then resume")
            remove_leftovers(self.folder)
            check_space(self.folder, staged.total_bytes)
            temporary.mkdir()
            records = [_write_rank_file(temporary, staged)]
            _raise_if_failed(records[0])
            records += [self._record_of(rank, temporary) for rank in range(1, self.world_size)]
            return self._publish(temporary, step, records, Contents(staged.tensors, values))
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    def _record_of(self, rank: int, temporary: Path) -> dict[str, Any]:
        """Wait for another rank's word on its file; raise what it failed of."""
        path = temporary / _record_name(rank)
        self._wait_for(lambda: bool(_whole(path)), f"{path}: rank {rank} has not written its part")
        record = _whole(path)
        _raise_if_failed(record)
        path.unlink()
        return record

    def _wait_for(self, condition: Callable[[], bool], what: str) -> None:
        while not condition():
            if self.clock() - self.started > self.limit:
                raise StorageError(f"{what} in {self.limit:.0f} s")
            time.sleep(POLL)

    def _publish(self, temporary: Path, step: int, records: list[dict[str, Any]], contents: Contents) -> Path:
        """Write the manifest and rename the folder: from here on the checkpoint exists."""
        files = {record["file"]: {key: record[key] for key in ("bytes", "sha256")} for record in records}
        path = temporary / TENSORS
        write_json(path, contents.to_json())
        files[TENSORS] = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        manifest = {"format": FORMAT, "step": step, "time": time.time(), "world_size": self.world_size} | self.about
        write_json(temporary / MANIFEST, seal(manifest | {"files": files}))
        final = self.folder / step_name(step)
        self.hooks.before_publish()
        _clear(final)
        temporary.rename(final)
        fsync_folder(self.folder)
        remove_leftovers(self.folder)
        return final


def _clear(place: Path) -> None:
    """Take away what has the name of a new checkpoint; a person's file or link is only renamed."""
    if place.is_symlink() or place.is_file():
        place.rename(place.with_name(f"{place.name}.{secrets.token_hex(4)}.aside"))
    elif place.exists():  # of an attempt that got here before and was refused since
        place.rename(place.with_name(f".{place.name}.{secrets.token_hex(4)}.old"))


def remove_leftovers(folder: Path, but: str = "") -> None:
    """Remove what killed saves and removals have left; none is in flight now, except the one named."""
    for entry in [*folder.glob(".step-*.tmp"), *folder.glob(".step-*.old")]:
        if entry.name == but:
            continue
        if entry.is_symlink() or not entry.is_dir():
            entry.unlink(missing_ok=True)
        shutil.rmtree(entry, ignore_errors=True)


def check_space(folder: Path, needed: int) -> None:
    """Raise StorageError unless `needed` bytes and a margin are free for us in the folder."""
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    if free < needed + MARGIN:
        raise StorageError(
            f"{folder}: a checkpoint needs {needed / 1e6:.1f} MB and {MARGIN / 1e6:.0f} MB to spare, "
            f"{free / 1e6:.1f} MB are free; make room, or lower pretrain.keep_last"
        )


def _write_rank_file(temporary: Path, staged: Staged) -> dict[str, Any]:
    """Write one rank's file; return its record, or one of the failure, so that rank 0 hears of it."""
    path, content = temporary / staged.file, staged.content.numpy().data
    record: dict[str, Any] = {"file": staged.file, "bytes": len(content)}
    try:
        with aside(lambda: sha256(content)) as digest, aside(lambda: _not_finite(staged)) as bad:
            write_durably(path, content)
    except OSError as error:
        path.unlink(missing_ok=True)  # there may be room for the record then
        return record | {"errno": error.errno, "error": error.strerror or str(error)}
    return record | {"sha256": digest.result(), "not_finite": bad.result()}


def _not_finite(staged: Staged) -> list[str]:
    return [name for name, part in staged.parts if not_finite(part)]


def _raise_if_failed(record: dict[str, Any]) -> None:
    """Raise what a record tells of instead of a hash."""
    if "error" in record:
        raise OSError(record["errno"], record["error"], record["file"])
    if names := record.get("not_finite"):
        raise DivergedError(f"not saved, because not finite: {', '.join(names[:10])}{' …' if len(names) > 10 else ''}")


def _whole(path: Path) -> dict[str, Any]:
    """Return another rank's record; an empty one as long as this host does not see the whole of it."""
    try:
        return read_object(path)
    except TornError:
        return {}


def _record_name(rank: int) -> str:
    return f".rank-{rank:05d}.json"


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
