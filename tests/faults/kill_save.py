"""Kill a save at each of its file operations, and look at what is left; damage every file of a checkpoint; fill a disk.

`nox -s faults` runs all of it: python tests/faults/kill_save.py [--every N]. For every operation k of a save with its retention
(open, write, fsync, rename, mkdir, unlink …) a process is forked that gets SIGKILL

    before it           the operation is not made
    in the middle       half of a write is made
    with its power      the operation is not made, and what was not fsynced is lost: contents are cut, names vanish

Each time the newest whole checkpoint must be that of the step before or of this one, with the numbers that were saved, and
the next save must succeed and leave nothing behind.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(PROJECT), str(PROJECT / "tests" / "faults")]

import table  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402

from pipeline.errors import StorageError  # noqa: E402
from pipeline.lm import saver as saver_module  # noqa: E402
from pipeline.lm.checkpoint import CheckpointError, load_newest, remove_old, verify  # noqa: E402
from pipeline.lm.saver import Hooks, Saver  # noqa: E402

OPERATIONS = ("open", "write", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir", "ftruncate")
MODES = ("before", "torn", "power")


class Killer:
    """Counts the file operations of this process, and ends it at the k-th (from 1; 0: never)."""

    def __init__(self, folder: Path, at: int, mode: str) -> None:
        self.folder, self.at, self.mode, self.count = str(folder), at, mode, 0
        self.kinds: list[str] = []
        self.unsynced: set[str] = set()  # files whose contents may be lost
        self.unnamed: set[str] = set()  # names that may be lost
        self.real = {name: getattr(os, name) for name in OPERATIONS}
        self.real_open = io.open
        for name in OPERATIONS:
            setattr(os, name, self._hook(name))
        io.open = self._open  # what pathlib calls

    def _hook(self, name: str) -> Any:
        def hooked(*words: Any, **more: Any) -> Any:
            self._reached(name, words)
            result = self.real[name](*words, **more)
            self._note(name, words, result)
            return result

        return hooked

    def _open(self, file: Any, mode: str = "r", *words: Any, **more: Any) -> Any:
        if not isinstance(file, int) and "w" in mode:
            self._reached("open", (file,))
            self.unsynced.add(os.fspath(file))
            self.unnamed.add(os.fspath(file))
        return self.real_open(file, mode, *words, **more)

    def _reached(self, name: str, words: tuple[Any, ...]) -> None:
        self.count += 1
        self.kinds.append(name)
        if self.count != self.at:
            return
        if self.mode == "torn" and name == "write":
            half = len(words[1]) // 2 // 4096 * 4096
            self.real["write"](words[0], words[1][:half])
        if self.mode == "power":
            self._lose()
        os.kill(os.getpid(), signal.SIGKILL)

    def _note(self, name: str, words: tuple[Any, ...], result: Any) -> None:
        """Keep account of what a power cut would take."""
        if name == "open" and words[1] & os.O_CREAT:
            self.unsynced.add(os.fspath(words[0]))
            self.unnamed.add(os.fspath(words[0]))
        elif name == "mkdir":
            self.unnamed.add(os.fspath(words[0]))
        elif name == "fsync":
            path = os.readlink(f"/proc/self/fd/{words[0]}")
            self.unsynced.discard(path)
            self.unnamed = {other for other in self.unnamed if os.path.dirname(other) != path}
        elif name in ("rename", "replace"):
            old, new = os.fspath(words[0]), os.fspath(words[1])
            moved = {path for path in self.unsynced | self.unnamed if path == old or path.startswith(old + "/")}
            for lost in (self.unsynced, self.unnamed):
                for path in moved & lost:
                    lost.remove(path)
                    lost.add(new + path[len(old) :])
            self.unnamed.add(new)

    def _lose(self) -> None:
        for path in self.unsynced:
            if os.path.isfile(path):
                os.truncate(path, 0)
        for path in sorted(self.unnamed):
            if path.startswith(self.folder) and not os.path.basename(path).endswith(".old"):
                shutil.rmtree(path, ignore_errors=True) if os.path.isdir(path) else Path(path).unlink(missing_ok=True)


def make(step: int) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    model = nn.Linear(100, 30)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float(step))
    return model, [torch.optim.AdamW(model.parameters())]


def save(folder: Path, *steps: int) -> None:
    with Saver(folder, {}, Hooks(on_saved=lambda saved: remove_old(folder, 1) and None)) as saver:
        for step in steps:
            saver.save(step, *make(step), {"step": step})


def killed_save(folder: Path, at: int, mode: str) -> bool:
    """Save step 2 in a process that is killed at operation `at`; tell whether it was."""
    pid = os.fork()
    if pid == 0:
        try:
            Killer(folder, at, mode)
            save(folder, 2)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def count_operations(folder: Path) -> list[str]:
    """Return the operations of an undisturbed save, in order."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        killer = Killer(folder, 0, "before")
        save(folder, 2)
        killer.real["write"](write, " ".join(killer.kinds).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        kinds = pipe.read().split()
    os.waitpid(pid, 0)
    return kinds


def check(folder: Path) -> int:
    """Return the step that is loaded after a kill; fail unless it is one of the two, whole, and training can go on."""
    model, optimizers = make(9)
    loaded = load_newest(folder, model, optimizers)
    assert loaded is not None
    step = loaded.progress["step"]
    assert step in (1, 2), step
    assert all(torch.equal(p, torch.full_like(p, float(step))) for p in model.parameters())
    save(folder, 3)
    left = sorted(path.name for path in folder.iterdir())
    assert left == ["step-00000000", "step-00000003"] or loaded.refused, left
    assert not any(name.startswith(".") for name in left), left
    return step


def kill_everywhere(root: Path, every: int) -> None:
    save(root / "count", 0, 1)
    kinds = count_operations(root / "count")
    print(f"a save with its retention: {len(kinds)} operations {dict(Counter(kinds))}")
    for mode in MODES:
        steps: Counter[int] = Counter()
        for at in range(1, len(kinds) + 1, every):
            if mode == "torn" and kinds[at - 1] != "write":
                continue
            folder = root / f"{mode}{at}"
            save(folder, 0, 1)
            assert killed_save(folder, at, mode), f"operation {at} was not reached"
            steps[check(folder)] += 1
            shutil.rmtree(folder)
        said = f"{sum(steps.values())} times, resumed from step {dict(sorted(steps.items()))}"
        print(f"killed {mode:6} {said}", flush=True)
        table.add(f"a save is killed at each operation: {mode}", True, said)


def flip_everywhere(root: Path, every: int) -> None:
    """Flip one bit in every place of the small files and in 512 of the large one; none may go unseen."""
    save(root, 1)
    checkpoint = root / "step-00000001"
    for path in sorted(checkpoint.iterdir()):
        content = path.read_bytes()
        stride = max(1, len(content) // 512) * every
        unseen = []
        for at in range(0, len(content), stride):
            path.write_bytes(content[:at] + bytes([content[at] ^ (1 << at % 8)]) + content[at + 1 :])
            try:
                verify(checkpoint)
            except CheckpointError:
                continue
            unseen.append(content[at : at + 1])
        path.write_bytes(content)
        # The blanks between the words of the manifest's JSON mean nothing.
        assert not b"".join(unseen).strip(), unseen
        said = f"{len(range(0, len(content), stride))} bits: all found or without a meaning"
        print(f"flipped {path.name}: {said}")
        table.add(f"bits flipped in {path.name}", True, said)
    verify(checkpoint)


def fill_a_disk(root: Path) -> None:
    """Save to a small file system until it is full; needs root."""
    root.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", root]).returncode != 0:
        print("full disk: not tried, a small file system cannot be mounted here")
        return
    try:
        save(root, 1)
        (root / "other").write_bytes(bytes(5 * 2**20))
        refused_save(root)  # by the look at the free space
        saver_module.MARGIN = -(10**9)
        with (root / "other").open("ab", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError:
                print("full disk: filled to the last page")
        refused_save(root)  # by the disk itself
        table.add("a save to a full disk", True)
    finally:
        subprocess.run(["umount", root], check=True)


def refused_save(root: Path) -> None:
    saver = Saver(root, {})
    saver.save(2, *make(2), {})
    try:
        saver.wait()
    except StorageError as error:
        print(f"full disk: {error}")
    else:
        raise AssertionError("the full disk was not told")
    assert sorted(path.name for path in root.iterdir()) == ["other", "step-00000001"]
    verify(root / "step-00000001")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="only every N-th operation and bit")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the process is forked
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        kill_everywhere(root, options.every)
        flip_everywhere(root / "flips", options.every)
        fill_a_disk(root / "disk")
    print(f"PASSED in {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
