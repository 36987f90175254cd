"""Put the ids of all pieces together: shards of one size, without duplicates, and the index that makes them data.

Which document comes into which shard follows from the order of the input alone, so the bytes are the same for any
number of pieces, processes and interruptions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.files import atomic_path, write_json
from pipeline.lm.documents import ReadCounts
from pipeline.lm.duplicates import Duplicates, find_duplicates
from pipeline.lm.encoding import PieceOutput
from pipeline.lm.processes import in_processes
from pipeline.lm.shards import FORMAT, INDEX, SPLITS, Shard, dtype_for, shard_name
from pipeline.lm.tokenizer import Tokenizer

COPY_TOKENS = 4 << 20  # at a time
LENGTHS = 33  # powers of two that a document's bytes may reach
FREQUENCIES = 60  # points of the curve of token frequencies


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


def write_data(
    data: Path,
    inputs: str,
    tokenizer: Tokenizer,
    outputs: Sequence[PieceOutput],
    sources: Sequence[int],
    *,
    shard_tokens: int,
    drop_duplicates: bool = True,
    processes: int = 1,
) -> dict[str, Any]:
    """Write shards and index from all pieces, whose `sources` are numbers in data:, and return the index."""
    counts = ReadCounts()
    for output in outputs:
        counts.merge(output.counts())
    marks = data / ".duplicates.tmp"
    splits = {}
    try:
        duplicates = find_duplicates(outputs, marks)
        assembly = Assembly(data, outputs, sources, duplicates, drop_duplicates)
        for split in SPLITS:
            cuts = assembly.cut(split, shard_tokens)
            work = partial(assembly.write, vocab_size=tokenizer.vocab_size)
            written = in_processes(work, cuts, processes)
            splits[split] = summarize(written, assembly.count_duplicates(split), tokenizer.vocab_size)
    finally:
        marks.unlink(missing_ok=True)
    index = {
        "format": FORMAT,
        "inputs": inputs,
        "dtype": dtype_for(tokenizer.vocab_size),
        "tokenizer": {
            "fingerprint": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
            "eos_id": tokenizer.eos_id,
            "exact": tokenizer.is_exact(),
        },
        "read": {name: getattr(counts, name) for name in ("files", "records", "empty", "malformed", "blank_lines")},
        "in_both_splits": duplicates.in_both_splits,
        "splits": splits,
    }
    _remove_strangers(data, splits)
    write_json(data / INDEX, index)
    return index


def summarize(written: Iterable[Written], duplicates: int, vocab_size: int) -> dict[str, Any]:
    """Return what the index says of a split."""
    shards: list[Shard] = []
    lengths, counts, longest = np.zeros(LENGTHS, np.int64), np.zeros(vocab_size, np.int64), 0
    for one in written:
        shards.append(one.shard)
        lengths += one.lengths
        counts += one.counts
        longest = max(longest, one.longest)
    text_bytes, tokens = sum(shard.bytes for shard in shards), sum(shard.tokens for shard in shards)
    used = np.sort(counts[counts > 0])[::-1]
    ranks = np.unique(np.geomspace(1, max(1, len(used)), FREQUENCIES).round().astype(int))[: len(used)]
    return {
        "documents": sum(shard.documents for shard in shards),
        "duplicates": duplicates,
        "bytes": text_bytes,
        "tokens": tokens,
        "bytes_per_token": round(text_bytes / tokens, 4) if tokens else 0.0,
        "longest_document": longest,
        "vocabulary_used": len(used),
        "document_lengths": [[1 << at, int(number)] for at, number in enumerate(lengths) if number],
        "token_frequencies": [[int(rank), int(used[rank - 1])] for rank in ranks],
        "shards": [asdict(shard) for shard in shards],
    }


def _remove_strangers(data: Path, splits: dict[str, Any]) -> None:
    """Remove shards that belong to no split, of an attempt with another config."""
    kept = {shard["file"] for split in splits.values() for shard in split["shards"]}
    for split in SPLITS:
        for path in data.glob(f"{split}-*.bin"):
            if path.name not in kept:
                path.unlink()


class Assembly:
    """All pieces, with the duplicates among them; `drop`: leave these out."""

    def __init__(
        self, data: Path, outputs: Sequence[PieceOutput], sources: Sequence[int], duplicates: Duplicates, drop: bool
    ) -> None:
        self.data, self.outputs, self.sources = data, outputs, sources
        self.duplicates, self.drop = duplicates, drop

    def _kept(self, piece: int, split: str) -> tuple[NDArray[np.void], NDArray[np.intp]]:
        """Return the rows of a piece's split, and the places in them of the documents that are kept."""
        rows = self.outputs[piece].documents()
        here = rows["split"] == SPLITS.index(split)
        left_out = self.duplicates.of(piece)[here] & self.drop
        return rows[here], np.flatnonzero(~left_out)

    def count_duplicates(self, split: str) -> int:
        """Count the documents of a split that have the text of an earlier one."""
        number = SPLITS.index(split)
        return sum(
            int(np.count_nonzero(self.duplicates.of(piece)[output.documents()["split"] == number]))
            for piece, output in enumerate(self.outputs)
        )

    def cut(self, split: str, shard_tokens: int) -> list[Cut]:
        """Lay out the shards of a split: each ends with the document that makes it `shard_tokens` or more."""
        cuts: list[Cut] = []
        have = shard_tokens  # in the last one
        for piece, source in enumerate(self.sources):
            rows, kept = self._kept(piece, split)
            ends = np.cumsum(rows["tokens"][kept], dtype=np.int64)
            start = 0
            while start < len(kept):
                if have >= shard_tokens or cuts[-1].source != source:
                    cuts.append(Cut(shard_name(split, len(cuts)), split, source))
                    have = 0
                before = int(ends[start - 1]) if start else 0
                end = min(int(np.searchsorted(ends, before + shard_tokens - have)) + 1, len(kept))
                cuts[-1].spans.append(Span(piece, start, end))
                have += int(ends[end - 1]) - before
                start = end
        return cuts

    def write(self, cut: Cut, vocab_size: int) -> Written:
        """Write one shard, by rename."""
        lengths, counts = np.zeros(LENGTHS, np.int64), np.zeros(vocab_size, np.int64)
        documents = text_bytes = longest = tokens = 0
        digest = hashlib.sha256()
        path = self.data / cut.file
        with atomic_path(path) as temporary, temporary.open("wb") as file:
            for span in cut.spans:
                rows, kept = self._kept(span.piece, cut.split)
                kept = kept[span.start : span.end]
                sizes = rows["bytes"][kept]
                documents += len(kept)
                text_bytes += int(sizes.sum(dtype=np.int64))
                longest = max(longest, int(sizes.max()))
                lengths += np.bincount(np.log2(sizes).astype(np.int64), minlength=LENGTHS)
                for ids in self._runs(span.piece, cut.split, rows, kept):
                    counts += np.bincount(ids, minlength=vocab_size)
                    tokens += ids.size
                    block = ids.tobytes()
                    digest.update(block)
                    file.write(block)
        shard = Shard(cut.file, documents, text_bytes, tokens, digest.hexdigest(), cut.source)
        return Written(shard, longest, lengths, counts)

    def _runs(
        self, piece: int, split: str, rows: NDArray[np.void], kept: NDArray[np.intp]
    ) -> Iterator[NDArray[np.unsignedinteger[Any]]]:
        """Give the ids of the documents `kept`; those that lie side by side together, as far as memory allows."""
        ends = np.cumsum(rows["tokens"], dtype=np.int64)
        starts = ends - rows["tokens"]
        ids = self.outputs[piece].ids(split)
        breaks = np.flatnonzero(np.diff(kept) != 1) + 1
        for run in np.split(kept, breaks):
            first, last = int(starts[run[0]]), int(ends[run[-1]])
            for start in range(first, last, COPY_TOKENS):
                yield np.asarray(ids[start : min(start + COPY_TOKENS, last)])
