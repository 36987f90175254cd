"""Find exact duplicates among all documents by their hashes, in bounded memory; the first of each text stays.

Documents are compared in buckets by the first bits of their hashes: all with the same hash are in one bucket, and one
bucket at a time is in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

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


def find_duplicates(outputs: Sequence[PieceOutput], path: Path, most: int = MOST_IN_BUCKET) -> Duplicates:
    """Mark the duplicates in a file at `path`, which the caller removes; what comes earlier in the input stays."""
    first = [0]
    for output in outputs:
        first.append(first[-1] + len(output.documents()))
    marks = np.memmap(path, np.bool_, "w+", shape=(max(1, first[-1]),))
    bits = max(0, (first[-1] // most)).bit_length()
    both = 0
    for bucket in range(1 << bits):
        both += _mark_bucket(outputs, first, marks, bucket, bits)
    return Duplicates(marks, first, both)


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
