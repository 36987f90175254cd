"""Read tensors of a checkpoint into memory that is already there, hashing on the way.

Every file that holds a part of what is wanted is read whole, once, because its sha256 covers all of it. The bytes that
are hashed are those in the final tensors, not a second reading of them. Reading, hashing and other files overlap.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict, deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import torch
from torch import Tensor

from pipeline.lm.contents import CheckpointError, Chunk, Contents, DamagedError, StoredTensor, again, missing

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

BLOCK = 8 * 2**20  # bytes read and hashed at a time
AHEAD = 8  # blocks that reading may be ahead of hashing
NAMES_SHOWN = 10


@dataclass(frozen=True)
class Piece:
    """What one chunk has for one tensor of this rank: `source`, a box of the chunk, goes to `target`, a view."""

    chunk: Chunk
    dtype: torch.dtype
    source: tuple[slice, ...]
    target: Tensor

    @property
    def is_direct(self) -> bool:
        """Tell whether the file's bytes are the target's bytes, so that no copy is needed."""
        whole = tuple(self.target.shape) == self.chunk.sizes
        return whole and self.target.device.type == "cpu" and self.target.is_contiguous()


def read_tensors(checkpoint: Path, manifest: dict[str, Any], contents: Contents, wanted: dict[str, Tensor]) -> None:
    """Fill the tensors `wanted` (DTensors: this rank's shards) from a checkpoint.

    Names, shapes and dtypes are compared before anything is read. Raise DamagedError with the file whose hash is not
    the one that was written; some tensors are filled by then.
    """
    pieces: dict[str, list[Piece]] = defaultdict(list)
    for name, tensor in wanted.items():
        stored = contents.tensors[name]
        check_tensor(checkpoint, name, stored, tensor)
        for piece in _pieces(checkpoint, name, stored, tensor):
            pieces[piece.chunk.file].append(piece)
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        jobs = [
            pool.submit(_read_file, checkpoint / name, manifest["files"][name]["sha256"], of_file)
            for name, of_file in pieces.items()
        ]
    for job in jobs:
        job.result()


def check_names(checkpoint: Path, stored: Iterable[str], wanted: Iterable[str]) -> None:
    """Raise CheckpointError unless both name the same tensors."""
    there, asked = set(stored), set(wanted)
    complaints = [
        f"{len(names)} {what}: {', '.join(sorted(names)[:NAMES_SHOWN])}{' …' if len(names) > NAMES_SHOWN else ''}"
        for what, names in (("missing", asked - there), ("unexpected", there - asked))
        if names
    ]
    if complaints:
        raise CheckpointError(f"{checkpoint}: not a checkpoint of this model; tensors {'; '.join(complaints)}")


def check_tensor(checkpoint: Path, name: str, stored: StoredTensor, tensor: Tensor) -> None:
    """Raise CheckpointError unless shape and dtype agree."""
    if stored.shape != tuple(tensor.shape):
        shapes = f"{list(stored.shape)}, the model has {list(tensor.shape)}"
        raise CheckpointError(f"{checkpoint}: {name} has shape {shapes}")
    if stored.dtype != tensor.dtype:
        raise CheckpointError(f"{checkpoint}: {name} is {stored.dtype}, the model has {tensor.dtype}")


def _pieces(checkpoint: Path, name: str, stored: StoredTensor, tensor: Tensor) -> list[Piece]:
    """Find the chunks that overlap this rank's part of a tensor."""
    local, offsets = _local_part(tensor.detach())
    found, covered = [], 0
    for chunk in stored.chunks:
        source, target = [], []
        for start, size, my_start, my_size in zip(chunk.offsets, chunk.sizes, offsets, local.shape, strict=True):
            first, last = max(start, my_start), min(start + size, my_start + my_size)
            source.append(slice(first - start, max(first, last) - start))
            target.append(slice(first - my_start, max(first, last) - my_start))
        # Not local[()]: that would be a copy for a tensor without dimensions on some devices.
        view = local[tuple(target)] if target else local
        if view.numel():
            found.append(Piece(chunk, stored.dtype, tuple(source), view))
            covered += view.numel()
    if covered != local.numel():
        raise DamagedError(f"{checkpoint}: {name} has {covered} of the {local.numel()} elements that are needed")
    return found


def _local_part(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return what this rank holds of a tensor and where that begins; DTensors hold a shard, others all."""
    if not hasattr(tensor, "placements"):
        return tensor, (0,) * tensor.dim()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sharded = cast("DTensor", tensor)
    _, offsets = compute_local_shape_and_global_offset(sharded.shape, sharded.device_mesh, sharded.placements)
    return sharded.to_local(), tuple(offsets)


def hash_file(path: Path, expected: str) -> None:
    """Read a file to check its sha256 alone."""
    _read_file(path, expected, [])


def _read_file(path: Path, expected: str, pieces: list[Piece]) -> None:
    """Read a file whole; put the pieces in their places; compare the hash."""
    try:
        digest = again(lambda: _fill_and_hash(path, pieces))
    except OSError as error:
        raise missing(path, error) from error
    if digest != expected:
        raise DamagedError(f"{path}: its sha256 is not the one that was written")


def _fill_and_hash(path: Path, pieces: list[Piece]) -> str:
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(max_workers=1) as thread:
        reader = _HashingReader(file, thread)
        for piece in sorted(pieces, key=lambda piece: piece.chunk.byte):
            reader.skip_to(piece.chunk.byte)
            _read_piece(reader, piece)
        reader.skip_to(None)
        return reader.digest()


def _read_piece(reader: _HashingReader, piece: Piece) -> None:
    if piece.is_direct:
        reader.fill(_bytes_of(piece.target))
        return
    chunk = torch.empty(piece.chunk.sizes, dtype=piece.dtype)
    reader.fill(_bytes_of(chunk))
    piece.target.copy_(chunk[piece.source] if piece.source else chunk)


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


class _HashingReader:
    """A file read from front to end, and hashed in another thread."""

    def __init__(self, file: BinaryIO, thread: ThreadPoolExecutor) -> None:
        self.file, self.thread, self.position, self.hash = file, thread, 0, hashlib.sha256()
        self.waiting: deque[Future[None]] = deque()

    def fill(self, memory: memoryview) -> None:
        """Read as many bytes as `memory` has."""
        for start in range(0, len(memory), BLOCK):
            block = memory[start : start + BLOCK]
            done = 0
            while done < len(block):
                count = self.file.readinto(block[done:])  # type: ignore[attr-defined]
                if not count:
                    raise DamagedError(f"{self.file.name}: ends at byte {self.position}")
                done += count
                self.position += count
            self._hash(block)

    def skip_to(self, position: int | None) -> None:
        """Read up to `position`, or to the end, only to hash it."""
        while position is None or self.position < position:
            block = self.file.read(BLOCK if position is None else min(BLOCK, position - self.position))
            if not block:
                if position is None:
                    return
                raise DamagedError(f"{self.file.name}: ends at byte {self.position}")
            self.position += len(block)
            self._hash(memoryview(block))

    def _hash(self, block: memoryview) -> None:
        self.waiting.append(self.thread.submit(self.hash.update, block))
        if len(self.waiting) > AHEAD:
            self.waiting.popleft().result()

    def digest(self) -> str:
        while self.waiting:
            self.waiting.popleft().result()
        return self.hash.hexdigest()
