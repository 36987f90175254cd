"""Cut the input into pieces of work, listed once in data/pieces.json: the same ones for any number of processes.

    data/pieces.json
    {"format": 1, "config": SHA256, "files": [[path, bytes, mtime in ns], …],
     "pieces": [[[number in data:, number in files or null, start, end or null], …], …]}
    data/pieces/00003/   what piece 3 gave; the folder appears by rename, so it is whole (see pipeline.lm.encoding)
    data/pieces/train-00000.json   that this shard is finished, while the index is not there (see pipeline.lm.finished)

A long file of lines is cut at bytes, parquet between row groups; text and compressed files are whole parts, and small
ones share a piece. A piece never holds parts of two sources.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from pipeline.errors import NotReadyError, UserError
from pipeline.files import read_json, write_text
from pipeline.lm.documents import Part
from pipeline.lm.sources import Input, format_of

FORMAT = 1
SMALLEST, LARGEST = 2 << 20, 256 << 20  # bytes of input in a piece
PIECES = 64  # that the input is cut into between these two
COMPRESSION = 4  # what a compressed file is taken to grow by

Piece = list[Part]


@dataclass(frozen=True)
class PieceList:
    """All pieces of the input, in the order in which their documents count."""

    config: str  # what the config says of the data, as a hash
    inputs: list[Input]
    pieces: list[Piece]

    @property
    def bytes(self) -> int:
        """Return the size of all files, as they are on disk."""
        return sum(item.size for item in self.inputs)

    @property
    def fingerprint(self) -> str:
        """Hash what decides what the pieces give: config, files as they were, and how they are cut."""
        return hashlib.sha256(json.dumps(self.to_json()).encode()).hexdigest()

    def write(self, path: Path) -> None:
        """Write the list, by rename."""
        write_text(path, json.dumps(self.to_json()) + "\n")  # names that are no UTF-8 come back as they were

    def to_json(self) -> dict[str, Any]:
        files = [item for item in self.inputs if item.path is not None]
        numbers = {item.path: number for number, item in enumerate(files)}
        pieces = [
            [[part.source, None if part.path is None else numbers[part.path], part.start, part.end] for part in piece]
            for piece in self.pieces
        ]
        listed = [[str(item.path), item.size, item.changed] for item in files]
        return {"format": FORMAT, "config": self.config, "files": listed, "pieces": pieces}

    def check_unchanged(self, number: int) -> None:
        """Raise UserError where a file of piece `number` is not the one that was listed."""
        listed = {item.path: (item.size, item.changed) for item in self.inputs}
        for part in self.pieces[number]:
            if part.path is None:
                continue
            try:
                status = part.path.stat()
            except OSError as error:
                raise UserError(f"{part.path}: it was there when the input was listed: {error.strerror}") from error
            if (status.st_size, status.st_mtime_ns) != listed[part.path]:
                raise UserError(
                    f"{part.path}: it has changed while tokenize was at work. Put it back, or resume the Run"
                )


def read_pieces(path: Path) -> PieceList:
    """Read the list. Raises NotReadyError where there is none."""
    try:
        record = read_json(path)
        if record is None:
            raise NotReadyError(f"{path}: the input is not listed yet: run tokenize from its beginning")
        files = [(Path(name), size, changed) for name, size, changed in record["files"]]
        pieces = [
            [Part(source, None if file is None else files[file][0], start, end) for source, file, start, end in piece]
            for piece in record["pieces"]
        ]
        return PieceList(record["config"], [Input(0, *file) for file in files], pieces)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise UserError(f"{path}: not a list of pieces: {error!r}. Remove it and run tokenize again") from error


def cut_input(config: str, inputs: Sequence[Input]) -> PieceList:
    """Cut the input into pieces of about the same size; neither processes nor tasks change what comes out."""
    weights = [_weight(item) for item in inputs]
    target = min(max(sum(weights) // PIECES, SMALLEST), LARGEST)
    pieces: list[Piece] = []
    room = 0
    for item, weight in zip(inputs, weights, strict=True):
        for part, size in _parts(item, weight, target):
            same = pieces and pieces[-1][-1].source == part.source and part.path is not None
            if not same or size > room:
                pieces.append([])
                room = target
            pieces[-1].append(part)
            room = room - size if part.path is not None else 0
    return PieceList(config, list(inputs), pieces)


def _weight(item: Input) -> int:
    """Estimate the bytes of text in an input; a dataset is a piece by itself whatever it holds."""
    if item.path is None:
        return 0
    kind, compression = format_of(item.path)
    return item.size * (COMPRESSION if compression or kind == "parquet" else 1)


def _parts(item: Input, weight: int, target: int) -> Iterator[tuple[Part, int]]:
    """Cut one input into parts; give each with its size as it counts for a piece."""
    kind, compression = format_of(item.path) if item.path is not None else ("", None)
    if kind == "lines" and not compression and weight > target:
        number = -(-weight // target)
        places = [at * item.size // number for at in range(number + 1)]
        for start, end in pairwise(places):
            yield Part(item.source, item.path, start, end), end - start
    elif kind == "parquet" and weight > target and item.path is not None:
        yield from _row_groups(item, item.path, weight, target)
    else:
        yield Part(item.source, item.path), weight


def _row_groups(item: Input, path: Path, weight: int, target: int) -> Iterator[tuple[Part, int]]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_metadata(path)
        sizes = [rows.row_group(number).total_byte_size for number in range(rows.num_row_groups)]
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: can't be read as parquet: {error}") from error
    start, room = 0, target
    share = weight / max(1, sum(sizes))
    for number, size in enumerate(sizes):
        if number > start and size * share > room:
            yield Part(item.source, path, start, number), target - int(room)
            start, room = number, target
        room -= int(size * share)
    yield Part(item.source, path, start, len(sizes)), target - int(room)
