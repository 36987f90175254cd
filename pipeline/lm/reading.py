"""Read tensors of a checkpoint into memory that is already there, hashing on the way.

Every file that holds a part of what is wanted is read whole, once, because its sha256 covers all of it. The bytes that
are hashed are those in the final tensors, not a second reading of them. Reading, hashing and other files overlap.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from pipeline.lm.contents import CheckpointError, Chunk, Contents, DamagedError, StoredTensor, again, missing

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

BLOCK = 8 * 2**20  # bytes read and hashed at a time
AHEAD = 8  # blocks that reading may be ahead of hashing
READERS = 3  # threads that read a file: one alone, copying from the page cache, is slower than hashing
MOST_PLACES = 512  # that one call reads into; Linux allows 1024
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
    """Read a file in blocks, some at once and ahead of the hashing, which needs them in order."""
    digest, waiting = hashlib.sha256(), deque[tuple[Future[None], Block]]()

    def hash_next() -> None:
        read, block = waiting.popleft()
        read.result()
        for memory in block.memory:
            digest.update(memory)
        for act in block.then:
            act()

    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(READERS) as pool:
        size = os.fstat(file.fileno()).st_size
        for block in _blocks(path, size, pieces):
            waiting.append((pool.submit(_read_block, path, file.fileno(), block), block))
            if len(waiting) > AHEAD:
                hash_next()
        while waiting:
            hash_next()
    return digest.hexdigest()


@dataclass
class Block:
    """Some of a file's bytes, from `byte` on, and the memory that they go to."""

    byte: int
    memory: list[memoryview] = field(default_factory=list)
    bytes: int = 0
    then: list[Callable[[], object]] = field(default_factory=list)  # what is to be done when it is read


def _blocks(path: Path, size: int, pieces: list[Piece]) -> Iterator[Block]:
    """Cut a file into blocks of at most BLOCK bytes: small tensors are read together, large ones in parts."""
    block = Block(0)
    for memory, then in _places(path, size, pieces):
        for start in range(0, len(memory), BLOCK):
            part = memory[start : start + BLOCK]
            if block.bytes + len(part) > BLOCK or len(block.memory) == MOST_PLACES:
                yield block
                block = Block(block.byte + block.bytes)
            block.memory.append(part)
            block.bytes += len(part)
        if then is not None:
            block.then.append(then)
    yield block


def _places(path: Path, size: int, pieces: list[Piece]) -> Iterator[tuple[memoryview, Callable[[], object] | None]]:
    """Say where a file's bytes go, from the first to the last, and what is to be done when they are there."""
    position = 0
    for piece in sorted(pieces, key=lambda piece: piece.chunk.byte):
        if piece.chunk.byte < position:
            raise DamagedError(f"{path}: two tensors lie at byte {piece.chunk.byte}")
        for length in _lengths(piece.chunk.byte - position):
            yield memoryview(bytearray(length)), None
        target = piece.target if piece.is_direct else torch.empty(piece.chunk.sizes, dtype=piece.dtype)
        yield _bytes_of(target), None if piece.is_direct else partial(_put, piece, target)
        position = piece.chunk.byte + target.numel() * target.element_size()
    for length in _lengths(size - position):
        yield memoryview(bytearray(length)), None


def _lengths(size: int) -> Iterator[int]:
    """Cut what is read only to be hashed: it need not be in memory at once."""
    return (min(BLOCK, size - start) for start in range(0, size, BLOCK))


def _put(piece: Piece, chunk: Tensor) -> None:
    piece.target.copy_(chunk[piece.source] if piece.source else chunk)


def _read_block(path: Path, fd: int, block: Block) -> None:
    left, position = list(block.memory), block.byte
    while left:
        count = os.preadv(fd, left, position)
        if not count:
            raise DamagedError(f"{path}: ends at byte {position}")
        position += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
