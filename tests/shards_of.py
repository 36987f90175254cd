"""Shards of ids that a test writes itself: pieces by hand, put together as tokenize does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pipeline.files import write_json
from pipeline.lm.documents import ReadCounts
from pipeline.lm.encoding import DOCUMENT, PieceOutput, checked
from pipeline.lm.indexing import write_data
from pipeline.lm.shards import DTYPES, SPLITS, dtype_for

Piece = dict[str, list[list[int]]]  # split: the ids of each document, without its end


def write_piece(
    folder: Path,
    piece: Piece,
    tokenizer: Any,
    *,
    digests: list[int] | None = None,
    text_bytes: list[int] | None = None,
) -> PieceOutput:
    """Make a piece's folder, named by a number; an id stands for three bytes of text. Equal `digests`: equal texts."""
    folder.mkdir(parents=True)
    dtype = dtype_for(tokenizer.vocab_size)
    sizes, splits = [], []
    for number, split in enumerate(SPLITS):
        documents = piece.get(split, [])
        ids = np.array([token for document in documents for token in [*document, tokenizer.eos_id]], np.int64)
        if documents:
            checked(ids, len(documents), tokenizer)
        ids.astype(DTYPES[dtype]).tofile(folder / f"{split}.bin")
        sizes += [len(document) for document in documents]
        splits += [number] * len(documents)
    table = np.zeros(len(sizes), DOCUMENT)
    table["high"] = digests or [int(folder.name) << 32 | at for at in range(len(sizes))]
    table["bytes"] = text_bytes or [3 * size for size in sizes]
    table["tokens"], table["split"] = np.array(sizes) + 1, splits
    table.tofile(folder / "documents.bin")
    write_json(folder / "counts.json", ReadCounts().to_json())
    return PieceOutput(folder, dtype)


def write_shards(
    data: Path,
    train: list[list[int]],
    validation: list[list[int]],
    tokenizer: Any,
    shard_tokens: int = 10,
    text_bytes: list[int] | None = None,
) -> dict[str, Any]:
    """Write shards and index of one piece and return the index."""
    folder, piece = data / "pieces" / "00000", {"train": train, "validation": validation}
    output = write_piece(folder, piece, tokenizer, text_bytes=text_bytes)
    return write_data(data, "inputs", tokenizer, [output], [0], made_from="x", shard_tokens=shard_tokens)
