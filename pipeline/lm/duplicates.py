"""Find exact duplicates among all documents by their hashes, in bounded memory; the first of each text stays.

Documents are compared in buckets by the first bits of their hashes: all with the same hash are in one bucket, and one
bucket at a time is in memory.

    data/pieces/duplicates.bin, .json    a byte per document; its hash and what it was made from
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.files import atomic_path, read_json, sha256_file, write_json
from pipeline.lm.encoding import PieceOutput
from pipeline.lm.shards import SPLITS

MOST_IN_BUCKET = 4_000_000  # about 300 MB while they are sorted


@dataclass(frozen=True)
class Duplicates:
    """Which documents have the text of an earlier one, over all pieces one after another."""

    marks: NDArray[np.bool_]  # (documents,), mapped from a file: there may be more than memory holds
    first: list[int]  # number of each piece's first document, and of all
    in_both_splits: int  # texts

    def of(self, piece: int) -> NDArray[np.bool_]:
        """Return the marks (N,) of one piece's documents."""
        return self.marks[self.first[piece] : self.first[piece + 1]]


def find_duplicates(
    outputs: Sequence[PieceOutput], path: Path, made_from: str, most: int = MOST_IN_BUCKET
) -> Duplicates:
    """Mark the duplicates in a file at `path`, which the caller removes; what comes earlier in the input stays.

    What an attempt that was made from the same, as `made_from` says, has found is taken as it is.
    """
    first = [0]
    for output in outputs:
        first.append(first[-1] + len(output.documents()))
    both = _known(path, made_from)
    if both is None:
        with atomic_path(path, durable=False) as temporary:  # the hash tells what a power loss has taken
            both = _mark_all(outputs, first, temporary, most)
        record = {"made_from": made_from, "sha256": sha256_file(path), "in_both_splits": both}
        write_json(_record(path), record, durable=False)
    return Duplicates(np.memmap(path, np.bool_, "r"), first, both)


def _known(path: Path, made_from: str) -> int | None:
    """Return how many texts are in both splits, as the record of the marks at `path` says; None if it does not hold."""
    try:
        record = read_json(_record(path))
        if record is None or record["made_from"] != made_from or record["sha256"] != sha256_file(path):
            return None
        return int(record["in_both_splits"])
    except (KeyError, TypeError, ValueError, FileNotFoundError):
        return None


def _record(path: Path) -> Path:
    return path.with_suffix(".json")


def _mark_all(outputs: Sequence[PieceOutput], first: Sequence[int], path: Path, most: int) -> int:
    """Write the marks to `path`, bucket after bucket; return how many texts are in both splits."""
    marks = np.memmap(path, np.bool_, "w+", shape=(max(1, first[-1]),))
    bits = max(0, (first[-1] // most)).bit_length()
    both = sum(_mark_bucket(outputs, first, marks, bucket, bits) for bucket in range(1 << bits))
    marks.flush()
    return both


def _mark_bucket(
    outputs: Sequence[PieceOutput], first: Sequence[int], marks: NDArray[np.bool_], bucket: int, bits: int
) -> int:
    """Mark the duplicates of one bucket; return how many of its texts are in both splits."""
    found = []
    for output, begin in zip(outputs, first, strict=False):
        rows = output.documents()
        # A shift by all 64 bits would do nothing.
        here = np.flatnonzero(rows["high"] >> np.uint64(64 - bits) == bucket) if bits else np.arange(len(rows))
        found.append((rows["high"][here], rows["low"][here], rows["split"][here], here + begin))
    high, low, split, number = (np.concatenate(columns) for columns in zip(*found, strict=True))
    order = np.lexsort((number, low, high))
    same = (high[order][1:] == high[order][:-1]) & (low[order][1:] == low[order][:-1])
    marks[number[order][1:][same]] = True
    assert len(SPLITS) == 2
    return int(np.count_nonzero(same & (split[order][1:] != split[order][:-1])))
