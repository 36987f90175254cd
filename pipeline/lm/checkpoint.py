"""Find, verify, load and remove checkpoints; saver.py makes them, contents.py says what is in them."""

from __future__ import annotations

import dataclasses
import secrets
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from pipeline.errors import NotReadyError, UserError
from pipeline.lm.contents import (
    TENSORS,
    AbsentError,
    CheckpointError,
    DamagedError,
    again,
    read_contents,
    read_manifest,
)
from pipeline.lm.reading import check_names, hash_file, read_tensors
from pipeline.lm.together import on_all, on_main
from pipeline.run.steps import PINNED, leased_steps, reading, step_folders, step_name

MODEL = "model."
LAG_SECONDS = 30.0  # that a network file system may show this host less than what rank 0 has seen
WRAPPERS = ("_orig_mod.",)  # what torch.compile puts into names


@dataclass(frozen=True)
class Loaded:
    """The checkpoint that was loaded, and why newer ones were not."""

    path: Path
    progress: dict[str, int]
    bytes: int  # of all its files
    manifest: dict[str, Any]
    refused: list[str] = field(default_factory=list)


def verify(checkpoint: Path) -> dict[str, Any]:
    """Return the manifest of a whole checkpoint; raise DamagedError with the file and the reason otherwise."""
    manifest = read_manifest(checkpoint)
    read_contents(checkpoint, manifest)
    with ThreadPoolExecutor() as pool:
        data = [(checkpoint / name, file["sha256"]) for name, file in manifest["files"].items() if name != TENSORS]
        for job in [pool.submit(hash_file, path, digest) for path, digest in data]:
            job.result()
    return manifest


def load_newest(folder: Path, model: nn.Module, optimizers: list[Optimizer]) -> Loaded | None:
    """Load the newest whole checkpoint, at any world size; all ranks call it and get the same one.

    None only where no step folder exists at all: a Run that has been trained never begins again by itself. Rank 0
    chooses, so that a slow file system cannot split the ranks; each rank verifies what it reads.
    """
    refused: list[str] = []
    for name in on_main(lambda: _names(folder)):
        try:
            on_main(lambda name=name: read_manifest(folder / name))  # type: ignore[misc]
            loaded = on_all(lambda name=name: _load_patiently(folder / name, model, optimizers))  # type: ignore[misc]
        except DamagedError as error:
            refused.append(str(error))
        else:
            return dataclasses.replace(loaded, refused=refused)
    if refused:
        listed = "\n".join(f"  {reason}" for reason in refused)
        raise CheckpointError(
            f"{folder}: none of the checkpoints is whole, and training does not begin again by itself:\n{listed}\n"
            "Restore one of them, or give the Run a new name"
        )
    return None


def _load_patiently(checkpoint: Path, model: nn.Module, optimizers: list[Optimizer]) -> Loaded:
    """Load what rank 0 has seen to be there, as soon as this rank sees it too."""
    deadline = time.monotonic() + LAG_SECONDS
    while True:
        try:
            return load_checkpoint(checkpoint, model, optimizers)
        except (AbsentError, NotReadyError):
            if time.monotonic() > deadline:
                raise
        time.sleep(0.1)


def load_checkpoint(checkpoint: Path, model: nn.Module, optimizers: list[Optimizer]) -> Loaded:
    """Load one checkpoint into model and optimizers, which are undefined when it turns out to be damaged."""
    # Imported here: it brings torch._dynamo, seconds that evaluate and inference need not pay.
    from pipeline.lm.state import GROUPS, restore_settings, training_state

    manifest = read_manifest(checkpoint)
    contents = read_contents(checkpoint, manifest)
    tensors, _ = training_state(model, optimizers)
    check_names(checkpoint, contents.tensors, tensors)
    read_tensors(checkpoint, manifest, contents, tensors)
    restore_settings(model, optimizers, contents.values[GROUPS])
    progress = {name: int(value) for name, value in contents.values["progress"].items()}
    return Loaded(checkpoint, progress, sum(file["bytes"] for file in manifest["files"].values()), manifest)


def load_weights(checkpoint: Path, model: nn.Module) -> dict[str, Any]:
    """Load the model alone, verified, and return the manifest.

    Raise NotReadyError where retention has taken the checkpoint away.
    """
    with reading(checkpoint):
        manifest = read_manifest(checkpoint)
        contents = read_contents(checkpoint, manifest)
        wanted = {MODEL + _plain(name): tensor for name, tensor in model.state_dict().items()}
        check_names(checkpoint, [name for name in contents.tensors if name.startswith(MODEL)], wanted)
        read_tensors(checkpoint, manifest, contents, wanted)
    return manifest


def _plain(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def remove_old(
    folder: Path,
    keep_last: int,
    *,
    keep_every: int | None = None,
    wanted: Callable[[int], bool] = lambda step: False,
) -> list[int]:
    """Delete all checkpoints but the first, the newest `keep_last`, every `keep_every`-th, pinned and `wanted` ones.

    Only what is complete and has its size counts as one of the newest, so that nothing goes before its successor is
    there. What someone reads stays until a later call. Return the steps deleted.
    """
    steps = [step for step, checkpoint in step_folders(folder).items() if _is_complete(checkpoint)]
    read = leased_steps(folder)
    old = [
        step
        for step in steps[1:-keep_last]
        if not (keep_every and step % keep_every == 0)
        and step not in read
        and not (folder / step_name(step) / PINNED).exists()
        and not wanted(step)
    ]
    return [step for step in old if _remove(folder, step)]


def _remove(folder: Path, step: int) -> bool:
    """Delete one checkpoint; False where someone has begun to read it since we looked.

    Renamed first, so that a reader sees the whole folder or none. A reader writes its lease and then looks for the
    folder, we rename it and then look for leases: one of the two sees the other.
    """
    checkpoint = folder / step_name(step)
    doomed = folder / f".{checkpoint.name}.{secrets.token_hex(4)}.old"
    checkpoint.rename(doomed)
    if step in leased_steps(folder):
        doomed.rename(checkpoint)
        return False
    if doomed.is_symlink():  # it was kept on another disk
        doomed.unlink()
    shutil.rmtree(doomed, ignore_errors=True)
    return True


def _names(folder: Path) -> list[str]:
    """List the step folders, whole or not, the newest first."""
    return [step_name(step) for step in reversed(again(lambda: step_folders(folder)))]


def _is_complete(checkpoint: Path) -> bool:
    try:
        read_manifest(checkpoint)
    except UserError:
        return False
    return True
