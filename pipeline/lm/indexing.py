"""Put the ids of all pieces together: shards of one size, without duplicates, and the index that makes them data.

Which document comes into which shard follows from the order of the input alone, so the bytes are the same for any
number of pieces, processes and interruptions. A shard that an interrupted attempt has finished is left as it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.files import atomic_path, write_json
from pipeline.lm.documents import ReadCounts
from pipeline.lm.duplicates import Duplicates, find_duplicates
from pipeline.lm.encoding import PieceOutput
from pipeline.lm.finished import Cut, Finished, Span, Written
from pipeline.lm.processes import in_processes
from pipeline.lm.shards import FORMAT, INDEX, SPLITS, Shard, dtype_for, shard_name
from pipeline.lm.tokenizer import Tokenizer

COPY_TOKENS = 4 << 20  # at a time
LENGTHS = 33  # powers of two that a document's bytes may reach
FREQUENCIES = 60  # points of the curve of token frequencies


def write_data(
    data: Path,
    inputs: str,
    tokenizer: Tokenizer,
    outputs: Sequence[PieceOutput],
    sources: Sequence[int],
    *,
    made_from: str,
    shard_tokens: int,
    drop_duplicates: bool = True,
    processes: int = 1,
    tell: Callable[[Written, int], None] = lambda written, shards: None,
    before_index: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Write shards and index from all pieces, whose `sources` are numbers in data:, and return the index.

    What an attempt with the same `made_from` has left is taken as it is: which documents are duplicates, and finished
    shards. `tell` is called with each shard and with how many there will be.
    """
    counts = ReadCounts()
    for output in outputs:
        counts.merge(output.counts())
    records = outputs[0].folder.parent
    duplicates = find_duplicates(outputs, records / "duplicates.bin", made_from)
    assembly = Assembly(data, outputs, sources, duplicates, drop_duplicates)
    cuts = {split: assembly.cut(split, shard_tokens) for split in SPLITS}
    _remove_strangers(data, {cut.file for of_split in cuts.values() for cut in of_split})
    shards = sum(map(len, cuts.values()))
    work = partial(assembly.provide, vocab_size=tokenizer.vocab_size, finished=Finished(data, records, made_from))
    splits = {}
    for split in SPLITS:
        # Closed, or the processes would outlive an error as long as its traceback does: at exit we would wait for them.
        with closing(in_processes(work, cuts[split], processes)) as written:
            told = _told(written, lambda one: tell(one, shards))
            splits[split] = summarize(told, assembly.count_duplicates(split), tokenizer.vocab_size)
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
    before_index()
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


def _told(written: Iterable[Written], tell: Callable[[Written], None]) -> Iterator[Written]:
    for one in written:
        tell(one)
        yield one


def _remove_strangers(data: Path, kept: set[str]) -> None:
    """Remove shards that will not be there, of an attempt with another config, before others need their room."""
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

    def provide(self, cut: Cut, vocab_size: int, finished: Finished) -> Written:
        """Find the shard of a cut, or write it; `finished` then knows it."""
        written = finished.find(cut)
        if written is None:
            written = self.write(cut, vocab_size)
            finished.remember(cut, written)
        return written

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
