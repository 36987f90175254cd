"""A file is read in blocks, several at once: each byte arrives in its place, and all are hashed in order."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import pytest
import torch

from pipeline.lm import reading
from pipeline.lm.contents import Chunk, DamagedError
from pipeline.lm.reading import Piece, hash_file

SIZE = 5000


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "BLOCK", 64)
    monkeypatch.setattr(reading, "MOST_PLACES", 3)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rank-00000.bin"
    path.write_bytes(random.Random(0).randbytes(SIZE))
    return path


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def piece(byte: int, target: torch.Tensor) -> Piece:
    whole = tuple(slice(0, size) for size in target.shape)
    chunk = Chunk((0,) * target.dim(), tuple(target.shape), "rank-00000.bin", byte)
    return Piece(chunk, target.dtype, whole, target)


def test_each_tensor_gets_its_bytes(file: Path) -> None:
    content = file.read_bytes()
    places = [0, 4, 8, 9, 40, 1000, 1900, SIZE - 7]
    sizes = [4, 4, 1, 20, 900, 900, 64, 7]  # next to each other, with gaps, smaller and larger than a block
    targets = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    columns = torch.zeros(2, 60, dtype=torch.uint8).T  # no copy of a file's bytes: it has to be put there
    pieces = [piece(byte, target) for byte, target in zip(places, targets, strict=True)]
    reading._read_file(file, sha256(file), [piece(3000, columns), *reversed(pieces)])
    for byte, target in zip(places, targets, strict=True):
        assert bytes(target.tolist()) == content[byte : byte + len(target)]
    assert bytes(columns.flatten().tolist()) == content[3000:3120]


@pytest.mark.parametrize("at", [0, 63, 64, 2500, SIZE - 1])
def test_a_changed_byte_is_found_wherever_it_is(file: Path, at: int) -> None:
    expected, content = sha256(file), bytearray(file.read_bytes())
    hash_file(file, expected)
    content[at] ^= 1
    file.write_bytes(content)
    with pytest.raises(DamagedError, match="its sha256 is not the one that was written"):
        hash_file(file, expected)
    with pytest.raises(DamagedError):
        reading._read_file(file, expected, [piece(2400, torch.zeros(200, dtype=torch.uint8))])


def test_a_file_that_ends_early_is_named(file: Path) -> None:
    with pytest.raises(DamagedError, match=r"rank-00000\.bin: ends at byte 5000"):
        reading._read_file(file, sha256(file), [piece(SIZE - 10, torch.zeros(20, dtype=torch.uint8))])


def test_tensors_that_lie_over_each_other_are_refused(file: Path) -> None:
    pieces = [piece(100, torch.zeros(20, dtype=torch.uint8)), piece(110, torch.zeros(20, dtype=torch.uint8))]
    with pytest.raises(DamagedError, match="two tensors lie at byte 110"):
        reading._read_file(file, sha256(file), pieces)


def test_an_empty_file_has_a_hash(tmp_path: Path) -> None:
    path = tmp_path / "empty.bin"
    path.touch()
    hash_file(path, hashlib.sha256().hexdigest())
