"""Know the shards that an earlier attempt has finished, so that the next one writes only the others.

    data/pieces/train-00000.json    written when the shard is in its place, removed with the pieces
    {"made_from": SHA256 of the pieces, the tokenizer and the cut, "stat": [size, mtime_ns, ctime_ns, inode],
     "shard": {as in the index}, "longest": 9000, "lengths": [documents by size, …], "counts": [of each token, …]}

A shard that its record does not describe is written anew. One whose file is another than the record has seen, as far as
the file system knows, is hashed first: it may have been copied, or cut.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.files import read_json, sha256_file, stat_of, write_text
from pipeline.lm.shards import Shard

FORMAT = 1


class Span(NamedTuple):
    """Documents of a piece that are kept: from the `start`-th to before the `end`-th of its split."""

    piece: int
    start: int
    end: int


@dataclass(frozen=True)
class Cut:
    """What one shard will hold."""

    file: str
    split: str
    source: int
    spans: list[Span] = field(default_factory=list)


@dataclass(frozen=True)
class Written:
    """A shard that is there, and what its documents and tokens are like."""

    shard: Shard
    longest: int  # bytes of a document
    lengths: NDArray[np.int64]  # (LENGTHS,): documents of 2^i to 2^(i+1) - 1 bytes
    counts: NDArray[np.int64]  # (V,): how often each token occurs
    found: bool = False  # written by an earlier attempt


@dataclass(frozen=True)
class Finished:
    """The records of shards in `data`, one file each in `folder`; `made_from`: what decides all their bytes."""

    data: Path
    folder: Path
    made_from: str

    def find(self, cut: Cut) -> Written | None:
        """Return the shard of a cut if it is there and whole, None where it is to be written."""
        try:
            record = read_json(self._record(cut))
            if record is None or record["made_from"] != self._made_from(cut):
                return None
            lengths, counts = (np.array(record[name], np.int64) for name in ("lengths", "counts"))
            written = Written(Shard(**record["shard"]), record["longest"], lengths, counts, found=True)
            if not self._is_whole(cut, written, record["stat"]):
                return None
        except (KeyError, TypeError, ValueError, FileNotFoundError):
            return None
        return written

    def remember(self, cut: Cut, written: Written) -> None:
        """Record a shard that is in its place; to be called once it would survive a power loss."""
        record: dict[str, Any] = {
            "made_from": self._made_from(cut),
            "stat": stat_of(self.data / cut.file),
            "shard": asdict(written.shard),
            "longest": written.longest,
            "lengths": written.lengths.tolist(),
            "counts": written.counts.tolist(),
        }
        write_text(self._record(cut), json.dumps(record) + "\n")

    def _is_whole(self, cut: Cut, written: Written, stat: list[int]) -> bool:
        path = self.data / cut.file
        if (now := stat_of(path)) == stat:
            return True
        if now[0] != stat[0] or sha256_file(path) != written.shard.sha256:
            return False
        self.remember(cut, written)
        return True

    def _record(self, cut: Cut) -> Path:
        return (self.folder / cut.file).with_suffix(".json")

    def _made_from(self, cut: Cut) -> str:
        return hashlib.sha256(json.dumps([FORMAT, self.made_from, asdict(cut)]).encode()).hexdigest()
