"""Checkpoints by torch.distributed.checkpoint (DCP): a folder appears by rename, with a manifest of hashes."""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.optim import Optimizer

from pipeline.errors import UserError
from pipeline.files import fsync_folder, read_json, sha256_file, write_json
from pipeline.steps import MANIFEST, STEP_FOLDER, list_steps, step_name

FORMAT = 1


class CheckpointError(UserError):
    """A checkpoint is not whole, or belongs to something else."""


def save_checkpoint(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizers: list[Optimizer],
    progress: dict[str, int],
    about: dict[str, Any],
) -> Path:
    """Save model, optimizers and counters as `folder`/step-N; all ranks call it. Return the new folder.

    `progress` are integers such as the tokens seen; `about` goes into the manifest as it is.
    """
    final = folder / step_name(step)
    temporary = folder / f".{final.name}.tmp"
    if _is_main():
        shutil.rmtree(temporary, ignore_errors=True)  # of a killed save
        temporary.mkdir(parents=True)
    _barrier()
    state = _training_state(model, optimizers, progress)
    writer = dcp.FileSystemWriter(temporary, single_file_per_rank=True, sync_files=True)
    with _quiet():
        dcp.save(state, storage_writer=writer, no_dist=not dist.is_initialized())
    _barrier()
    if _is_main():
        _publish(temporary, final, step, about)
    _barrier()
    return final


def _publish(temporary: Path, final: Path, step: int, about: dict[str, Any]) -> None:
    """Write the manifest and rename the folder: from here on the checkpoint exists."""
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256_file(path)} for path in sorted(temporary.iterdir())
    }
    manifest = {"format": FORMAT, "step": step, "time": time.time(), "world_size": _world_size()} | about
    write_json(temporary / MANIFEST, manifest | {"files": files})
    if final.exists():  # of an attempt that got here before and was refused since
        final.rename(final.with_name(f".{final.name}.{os.getpid()}.old"))
    temporary.rename(final)
    fsync_folder(final.parent)


def verify(checkpoint: Path) -> dict[str, Any]:
    """Return the manifest of a whole checkpoint; raise CheckpointError with the file and the reason otherwise."""
    manifest = read_json(checkpoint / MANIFEST)
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise CheckpointError(f"{checkpoint}: no manifest, so it was never completed")
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{checkpoint}: format {manifest.get('format')}, this version reads format {FORMAT}")
    if checkpoint.name != step_name(manifest["step"]):
        raise CheckpointError(f"{checkpoint}: its manifest belongs to step {manifest['step']}")
    for name, wanted in manifest["files"].items():
        path = checkpoint / name
        if not path.is_file():
            raise CheckpointError(f"{path}: missing")
        if (size := path.stat().st_size) != wanted["bytes"]:
            raise CheckpointError(f"{path}: {size} bytes, written were {wanted['bytes']}")
        if sha256_file(path) != wanted["sha256"]:
            raise CheckpointError(f"{path}: its sha256 is not the one that was written")
    return manifest


def newest_whole(folder: Path) -> tuple[Path | None, list[str]]:
    """Return the newest checkpoint that passes `verify`, and why newer ones were refused.

    None only where no step folder exists at all: a Run that has been trained never begins again by itself.
    """
    names = [entry.name for entry in folder.iterdir() if STEP_FOLDER.fullmatch(entry.name)] if folder.is_dir() else []
    refused = []
    for name in sorted(names, key=lambda name: int(name.removeprefix("step-")), reverse=True):
        try:
            verify(folder / name)
        except (CheckpointError, ValueError, KeyError, TypeError) as error:
            refused.append(str(error))
        else:
            return folder / name, refused
    if refused:
        listed = "\n".join(f"  {reason}" for reason in refused)
        raise CheckpointError(
            f"{folder}: none of the checkpoints is whole, and training does not begin again by itself:\n{listed}\n"
            "Restore one of them, or give the Run a new name"
        )
    return None, refused


def load_checkpoint(
    checkpoint: Path, model: nn.Module, optimizers: list[Optimizer], counters: tuple[str, ...]
) -> dict[str, int]:
    """Load a verified checkpoint into model and optimizers, at any world size; return the counters."""
    from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict

    state = _training_state(model, optimizers, dict.fromkeys(counters, 0))
    with _quiet():
        dcp.load(state, storage_reader=dcp.FileSystemReader(checkpoint), no_dist=not dist.is_initialized())
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizers, state["optimizer"])
    return {name: int(value) for name, value in state["progress"].items()}


def load_weights(checkpoint: Path, model: nn.Module) -> None:
    """Load only the model of a checkpoint, after verifying it."""
    verify(checkpoint)
    with _quiet():
        # Its tensors are the model's own: they are filled in place.
        dcp.load({"model": model.state_dict()}, storage_reader=dcp.FileSystemReader(checkpoint), no_dist=True)


def remove_old(folder: Path, keep_last: int, *, pinned: set[int]) -> list[int]:
    """Delete all but the newest `keep_last` checkpoints and the pinned ones; return the steps deleted."""
    old = [step for step in list_steps(folder)[:-keep_last] if step not in pinned]
    for step in old:
        # Renamed first, so that a reader sees the whole folder or none.
        doomed = folder / f".{step_name(step)}.{os.getpid()}.old"
        (folder / step_name(step)).rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)
    for leftover in folder.glob(".step-*.old"):
        shutil.rmtree(leftover, ignore_errors=True)
    return old


def _training_state(model: nn.Module, optimizers: list[Optimizer], progress: dict[str, int]) -> dict[str, Any]:
    """Collect what a checkpoint holds, named by parameter, so that any sharding can load it."""
    # Imported here: it brings torch._dynamo, seconds that evaluate and inference need not pay.
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizers),
        "progress": {name: torch.tensor(value) for name, value in progress.items()},
    }


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep DCP from warning that a single process is a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _is_main() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
