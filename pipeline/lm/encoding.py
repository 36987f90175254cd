"""Turn one piece of the input into ids: a folder that appears whole, whoever makes it and however often.

    data/pieces/00003/train.bin, validation.bin    ids, each document with its end, as in a shard
                      documents.bin                one row of DOCUMENT for each, in the order they were read
                      counts.json                  what reading met
                      hashes.json                  [[path, first byte, end or null, sha256], …] of what was read

Nothing is left out here: which documents are duplicates is known only when all pieces are there.
"""

from __future__ import annotations

import errno
import hashlib
import json
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from pipeline.config.sources import format_of
from pipeline.config.tokenize import DataSource
from pipeline.files import (
    TornError,
    fsync_file,
    fsync_folder,
    hash_range,
    read_json,
    read_object,
    write_json,
    write_text,
)
from pipeline.lm.documents import ReadCounts, read_part
from pipeline.lm.encoder import Encoder
from pipeline.lm.pieces import Piece
from pipeline.lm.shards import DTYPES, SPLITS, Ids, split_of
from pipeline.lm.tokenizer import Tokenizer

HASHES = "hashes.json"
GROUP_BYTES = 8 << 20  # of text that is encoded at a time
DOCUMENT = np.dtype([("high", "<u8"), ("low", "<u8"), ("bytes", "<u4"), ("tokens", "<u4"), ("split", "u1")])
"""`high` and `low`: the first 128 bits of the text's sha256; `tokens` counts the end; `split`: a place in SPLITS."""


class PieceOutput:
    """What one piece gave."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self.folder = folder
        self.dtype = DTYPES[dtype]

    def documents(self) -> NDArray[np.void]:
        """Return the rows (N,) of DOCUMENT."""
        return np.fromfile(self.folder / "documents.bin", DOCUMENT)

    def ids(self, split: str) -> Ids:
        """Return the ids (tokens,) of a split, mapped from disk."""
        path = self.folder / f"{split}.bin"
        return np.memmap(path, self.dtype, "r") if path.stat().st_size else np.empty(0, self.dtype)

    def counts(self) -> ReadCounts:
        """Return what reading met. Raises TornError where the disk has lost it."""
        path = self.folder / "counts.json"
        try:
            return ReadCounts(**read_object(path))
        except TypeError as error:
            raise TornError(f"{path}: {error}. Remove {self.folder} and run tokenize again") from error

    def hashes(self) -> list[tuple[str, int, int | None, str]]:
        """Return path, first byte, end and sha256 of what was read of each file; a piece of 0.1.0 does not say."""
        return [(str(path), start, end, digest) for path, start, end, digest in read_json(self.folder / HASHES) or []]


def read_piece(
    piece: Piece, sources: Sequence[DataSource], counts: ReadCounts, tell: Callable[[ReadCounts], None]
) -> Iterator[list[bytes]]:
    """Read a piece in groups of about GROUP_BYTES of text; `tell` is called before each."""
    group: list[bytes] = []
    together = 0
    for part in piece:
        for text in read_part(part, sources, counts):
            group.append(text)
            together += len(text)
            if together >= GROUP_BYTES:
                tell(counts)
                yield group
                group, together = [], 0
    if group:
        yield group


def encode_piece(
    piece: Piece,
    folder: Path,
    sources: Sequence[DataSource],
    encoder: Encoder,
    validation_fraction: float,
    *,
    tell: Callable[[ReadCounts], None] = lambda counts: None,
    before_publish: Callable[[], None] = lambda: None,
) -> ReadCounts:
    """Make the folder of a piece, and return what reading it met; `before_publish` may raise where files have changed.

    Raises UserError where a file can't be read to its end.
    """
    for left in folder.parent.glob(f".{folder.name}.*.tmp"):  # of one that was killed
        shutil.rmtree(left, ignore_errors=True)
    # Not named by process alone: in containers on two nodes the numbers are the same.
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(6)}.tmp")
    temporary.mkdir(parents=True)
    counts = ReadCounts()
    try:
        with ExitStack() as stack:
            ids = [stack.enter_context((temporary / f"{split}.bin").open("wb")) for split in SPLITS]
            table = stack.enter_context((temporary / "documents.bin").open("wb"))
            for texts in read_piece(piece, sources, counts, tell):
                table.write(_encode_group(texts, ids, encoder, validation_fraction).tobytes())
        write_json(temporary / "counts.json", counts.to_json(), durable=False)
        write_text(temporary / HASHES, json.dumps(list(_hash_inputs(piece))) + "\n", durable=False)
        before_publish()
        _publish(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return counts


def _hash_inputs(piece: Piece) -> Iterator[tuple[str, int, int | None, str]]:
    """Hash the files, or their ranges, that a piece has read: they are in memory still.

    What is not cut at bytes is hashed whole, by the piece that begins it.
    """
    for part in piece:
        if part.path is None:
            continue
        if format_of(part.path) == ("lines", None):
            yield str(part.path), part.start, part.end, hash_range(part.path, part.start, part.end)
        elif part.start == 0:
            yield str(part.path), 0, None, hash_range(part.path, 0, None)


def _publish(temporary: Path, folder: Path) -> None:
    """Rename the folder into its place when all of it is on disk; one that is there already has the same bytes.

    A rename that a power loss takes back only costs the work.
    """
    with ThreadPoolExecutor() as pool:  # files that are waited for together are often one write of the disk's
        list(pool.map(fsync_file, temporary.iterdir()))
    fsync_folder(temporary)
    try:
        temporary.rename(folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        shutil.rmtree(temporary, ignore_errors=True)


def _encode_group(
    texts: list[bytes], files: Sequence[BinaryIO], encoder: Encoder, validation_fraction: float
) -> NDArray[np.void]:
    """Append the ids of `texts` to the files of their splits; return their rows."""
    ids, ends = encoder.encode(texts)
    checked(ids, len(texts), encoder.tokenizer)
    digests = [hashlib.sha256(text).digest() for text in texts]
    halves = np.frombuffer(b"".join(digests), ">u8").reshape(len(texts), 4)
    rows = np.zeros(len(texts), DOCUMENT)
    rows["high"], rows["low"] = halves[:, 0], halves[:, 1]
    rows["bytes"] = [len(text) for text in texts]
    rows["tokens"] = np.diff(ends, prepend=0)
    rows["split"] = [SPLITS.index(split_of(digest, validation_fraction)) for digest in digests]
    of_ids = np.repeat(rows["split"], rows["tokens"])
    for split, file in enumerate(files):
        file.write(ids[of_ids == split].tobytes())
    return rows


def checked(ids: Ids, documents: int, tokenizer: Tokenizer) -> Ids:
    """Return ids (N,) of whole documents. Raises ValueError for one that no token has, or a text read as an end."""
    if ids.min() < 0 or ids.max() >= tokenizer.vocab_size:
        raise ValueError(f"token ids {ids.min()}..{ids.max()} do not fit a vocabulary of {tokenizer.vocab_size}")
    if (ends := int(np.count_nonzero(ids == tokenizer.eos_id))) != documents:
        raise ValueError(f"{ends} ends in {documents} documents: a text was read as the token {tokenizer.eos_id}")
    return ids
