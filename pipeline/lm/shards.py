"""Token shards: `<split>-00000.bin` files of plain little-endian ids, and one index.json; how they are read.

    data/index.json
    {"format": 1, "inputs": SHA256, "dtype": "uint16",
     "tokenizer": {"fingerprint": SHA256, "vocab_size": 4096, "eos_id": 1, "exact": true},
     "read": {"files": 512, "records": 512, "empty": 1, "malformed": 0, "blank_lines": 0},
     "in_both_splits": 0,
     "splits": {"train": {"documents", "duplicates", "bytes", "tokens", "bytes_per_token", "longest_document",
                          "vocabulary_used", "document_lengths": [[bytes from, documents], …],
                          "token_frequencies": [[rank, occurrences], …],
                          "shards": [{"file": "train-00000.bin", "documents", "bytes", "tokens", "sha256", "source"},
                                     …]},
                "validation": {…}}}

A document is the ids of its text and one end-of-document id. It never crosses a shard, and a shard never holds two
sources. `bytes` are UTF-8 bytes of the original text, what bits per byte divides by; a file's size is `tokens` times
the size of `dtype`. The index is written last: without it there is no data, with it every shard is whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import NotReadyError, UserError
from pipeline.files import read_json, sha256_file
from pipeline.lm.tokenizer import Tokenizer

FORMAT = 1
SPLITS = ("train", "validation")
INDEX = "index.json"
DTYPES: dict[str, np.dtype[np.unsignedinteger[Any]]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}

Ids = NDArray[np.integer[Any]]


def dtype_for(vocab_size: int) -> str:
    """Return the name of the smallest type that holds every id below `vocab_size`. Raises UserError above 2^32."""
    if vocab_size > 1 << 32:
        raise UserError(f"a vocabulary of {vocab_size} ids does not fit 32 bits")
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def split_of(digest: bytes, validation_fraction: float) -> str:
    """Choose the split by the text's sha256, so that no text is in both and more text moves nothing."""
    place = int.from_bytes(digest[:8], "big")  # even over 0 .. 2^64
    return "validation" if place < validation_fraction * 2**64 else "train"


def shard_name(split: str, number: int) -> str:
    return f"{split}-{number:05d}.bin"


@dataclass(frozen=True)
class Shard:
    """One shard as the index records it. `bytes` counts the documents' text as UTF-8."""

    file: str
    documents: int
    bytes: int
    tokens: int
    sha256: str
    source: int = 0  # number in data: that all its documents come from


class TokenShards:
    """Read the tokens of one split. Opening checks every file's size, and maps none."""

    def __init__(self, folder: Path, split: str) -> None:
        """Open `<folder>/<split>-*.bin`.

        Raises NotReadyError where there is no index yet, and UserError, naming the shard, where one is missing or is
        not of the size in the index.
        """
        self.folder = folder
        self.split = split
        try:
            index = read_json(folder / INDEX)
        except ValueError as error:
            raise UserError(f"{folder / INDEX}: not readable: {error}") from error
        if index is None:
            raise NotReadyError(f"{folder / INDEX}: no token shards here (yet): run tokenize first")
        try:
            self._read(index)
        except (KeyError, TypeError) as error:
            raise UserError(f"{folder / INDEX}: not an index of token shards: {error!r}") from error
        for shard in self.shards:
            self._check_size(shard)

    def _read(self, index: Any) -> None:
        if index["format"] != FORMAT:
            raise UserError(f"{self.folder / INDEX}: format {index['format']}; this version reads format {FORMAT}")
        if index["dtype"] not in DTYPES:
            raise UserError(f"{self.folder / INDEX}: dtype {index['dtype']!r} is not one of {', '.join(DTYPES)}")
        if self.split not in index["splits"]:
            raise UserError(f"{self.folder / INDEX}: no split {self.split!r}; there are {', '.join(index['splits'])}")
        split = index["splits"][self.split]
        self.dtype = DTYPES[index["dtype"]]
        self.tokenizer_fingerprint: str = index["tokenizer"]["fingerprint"]
        self.vocab_size: int = index["tokenizer"]["vocab_size"]
        self.eos_id: int = index["tokenizer"]["eos_id"]
        self.documents: int = split["documents"]
        self.bytes: int = split["bytes"]
        self.tokens: int = split["tokens"]
        self.shards = [Shard(**shard) for shard in split["shards"]]

    def _check_size(self, shard: Shard) -> None:
        path = self.folder / shard.file
        expected = shard.tokens * self.dtype.itemsize
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise UserError(f"{path}: this token shard is in the index, but not on disk. {self._mend()}") from None
        if size != expected:
            raise UserError(
                f"{path}: this token shard has {size} bytes, but {shard.tokens} tokens of {self.dtype.name} are "
                f"{expected}. {self._mend()}"
            )

    def _mend(self) -> str:
        return f"To make it again from the text, remove {self.folder / INDEX} and run tokenize"

    def __len__(self) -> int:
        return len(self.shards)

    def __getitem__(self, number: int) -> Ids:
        """Return the ids (tokens,) of one shard, mapped read-only from disk; the file is open while they are held."""
        return np.memmap(self.folder / self.shards[number].file, dtype=self.dtype, mode="r")

    def __iter__(self) -> Iterator[Ids]:
        return (self[number] for number in range(len(self)))

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raise UserError unless these shards were made with `tokenizer`."""
        if tokenizer.fingerprint != self.tokenizer_fingerprint:
            raise UserError(
                f"{self.folder / INDEX}: the shards were made with another tokenizer "
                f"({self.tokenizer_fingerprint[:12]}) than {tokenizer.path} ({tokenizer.fingerprint[:12]})"
            )

    def verify(self) -> None:
        """Read every shard whole: hash, highest id, one end-of-document id per document. Raises UserError."""
        for number, shard in enumerate(self.shards):
            path, ids = self.folder / shard.file, self[number]
            if ids.max() >= self.vocab_size:
                raise UserError(f"{path}: token id {ids.max()} is outside the vocabulary of {self.vocab_size} ids")
            if (ends := int(np.count_nonzero(ids == self.eos_id))) != shard.documents:
                raise UserError(f"{path}: {ends} document ends, but {shard.documents} documents in the index")
            if sha256_file(path) != shard.sha256:
                raise UserError(f"{path}: the content is not what the index records (sha256). {self._mend()}")
