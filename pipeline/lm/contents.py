"""The JSON files of a checkpoint folder: what they say, and what of it is believed.

    step-00000200/
      rank-00000.bin    raw bytes of the tensors that rank 0 wrote; every tensor begins at a multiple of 64 bytes
      tensors.json      {"tensors": {name: {dtype, shape, chunks: [{offsets, sizes, file, byte}]}}, "values": {…}}
      manifest.json     step, format and, written last, size and sha256 of the other files and of its own text
      pinned            (made by a person) an empty file: retention leaves this folder alone

A tensor is a list of chunks, so that a sharded one is nothing special. There is nothing here that could run code when
it is read: no pickles, only JSON and bytes whose places are checked before they are used.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from pipeline.errors import NotReadyError, UserError
from pipeline.run.steps import MANIFEST, step_name

FORMAT = 2
TENSORS = "tensors.json"
T = TypeVar("T")
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip
# What goes wrong when JSON that is not ours is taken for ours.
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


class CheckpointError(UserError):
    """A checkpoint is not whole, or belongs to something else."""


class DamagedError(CheckpointError):
    """A checkpoint is not what was written; an older one may be."""


class AbsentError(DamagedError):
    """A file of a checkpoint is missing or short: damaged, or not yet to be seen from this host."""


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, at `byte` of `file`, its elements in row-major order."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    byte: int


@dataclass(frozen=True)
class StoredTensor:
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds: tensors by name, and numbers and texts by name."""

    tensors: dict[str, StoredTensor]
    values: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        tensors = {
            name: {
                "dtype": str(stored.dtype).removeprefix("torch."),
                "shape": stored.shape,
                "chunks": [asdict(chunk) for chunk in stored.chunks],
            }
            for name, stored in self.tensors.items()
        }
        return {"tensors": tensors, "values": self.values}


def seal(manifest: dict[str, Any]) -> dict[str, Any]:
    """Add the sha256 of the manifest's own text, so that an edited or rotten one is found."""
    return manifest | {"sha256": _own_hash(manifest)}


def _own_hash(manifest: dict[str, Any]) -> str:
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def read_bytes(path: Path) -> bytes:
    """Read a whole file of a checkpoint; tell a checkpoint that retention took away from a damaged one."""
    try:
        return again(path.read_bytes)
    except OSError as error:
        raise missing(path, error) from error


def again(read: Callable[[], T]) -> T:
    """Call `read`, and once more where a network file system has let a handle go stale."""
    try:
        return read()
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
    return read()


def missing(path: Path, error: OSError) -> UserError:
    """Make the error of a file that cannot be read: its folder is gone, or it is damaged."""
    if not path.parent.is_dir():
        if path.parent.is_symlink() or path.parent.exists():
            return AbsentError(f"{path.parent}: a file, or a link that leads nowhere, where a checkpoint belongs")
        return NotReadyError(f"{path.parent}: this checkpoint is gone; retention (pretrain.keep_last) removes old ones")
    reason = "missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
    return AbsentError(f"{path}: {reason}")


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint whose files have the right sizes; the data itself is not read."""
    if not (checkpoint / MANIFEST).is_file() and checkpoint.is_dir():
        raise AbsentError(f"{checkpoint}: no manifest, so it was never completed")
    text = read_bytes(checkpoint / MANIFEST)
    try:
        manifest = json.loads(text)
        _check_manifest(checkpoint, manifest)
    except MALFORMED as error:
        raise DamagedError(f"{checkpoint / MANIFEST}: not a manifest ({type(error).__name__}: {error})") from error
    for name, wanted in manifest["files"].items():
        path = checkpoint / name
        try:
            size = again(path.stat).st_size
        except OSError as error:
            raise missing(path, error) from error
        if size != wanted["bytes"]:
            raise AbsentError(f"{path}: {size} bytes, written were {wanted['bytes']}")
    return dict(manifest)


def _check_manifest(checkpoint: Path, manifest: dict[str, Any]) -> None:
    if manifest["format"] != FORMAT:
        raise DamagedError(f"{checkpoint}: format {manifest['format']}, this version reads format {FORMAT}")
    if checkpoint.name != step_name(manifest["step"]):
        raise DamagedError(f"{checkpoint}: its manifest belongs to step {manifest['step']}")
    if manifest["sha256"] != _own_hash(manifest):
        raise DamagedError(f"{checkpoint / MANIFEST}: its sha256 is not the one that was written")
    for name, file in manifest["files"].items():
        if not FILE_NAME.fullmatch(name) or not isinstance(file["bytes"], int) or not isinstance(file["sha256"], str):
            raise ValueError(f"file {name!r}")
    if TENSORS not in manifest["files"]:
        raise ValueError(f"no {TENSORS}")


def read_contents(checkpoint: Path, manifest: dict[str, Any]) -> Contents:
    """Read tensors.json, after its hash; refuse chunks that lie outside their tensor or file."""
    path = checkpoint / TENSORS
    text = read_bytes(path)
    if hashlib.sha256(text).hexdigest() != manifest["files"][TENSORS]["sha256"]:
        raise DamagedError(f"{path}: its sha256 is not the one that was written")
    try:
        record = json.loads(text)
        tensors = {name: _tensor(stored, manifest["files"]) for name, stored in record["tensors"].items()}
        return Contents(tensors, dict(record["values"]))
    except MALFORMED as error:
        raise DamagedError(f"{path}: not a list of tensors ({type(error).__name__}: {error})") from error


def _tensor(record: dict[str, Any], files: dict[str, Any]) -> StoredTensor:
    dtype, shape = DTYPES[record["dtype"]], _sizes(record["shape"])
    chunks = []
    for item in record["chunks"]:
        chunk = Chunk(_sizes(item["offsets"]), _sizes(item["sizes"]), item["file"], *_sizes([item["byte"]]))
        inside = [start + size <= whole for start, size, whole in zip(chunk.offsets, chunk.sizes, shape, strict=True)]
        if not all(inside) or chunk.byte + math.prod(chunk.sizes) * dtype.itemsize > files[chunk.file]["bytes"]:
            raise ValueError(f"chunk {item} lies outside its tensor or file")
        chunks.append(chunk)
    return StoredTensor(dtype, shape, tuple(chunks))


def _sizes(values: list[int]) -> tuple[int, ...]:
    if not all(type(value) is int and value >= 0 for value in values):
        raise ValueError(f"sizes {values}")
    return tuple(values)
