"""Read documents from files and Hugging Face datasets: whole, in one fixed order, with every bad line counted.

A document is checked UTF-8, byte for byte what the file holds; only documents with something other than blanks in them
are given on. `read_part` reads a part of the input by itself, in any process.
"""

from __future__ import annotations

import errno
import io
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.config.tokenize import DataSource
from pipeline.errors import NotReadyError, StorageError, UserError
from pipeline.lm.sources import format_of

MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
PLACES_KEPT = 20
MOST_BYTES = 64 << 20  # of a document, and of its line: memory has to hold a few copies of it
TOO_LONG = f"longer than {MOST_BYTES:,} bytes; cut it into several documents"
COUNTED = ("files", "records", "documents", "text_bytes", "empty", "malformed", "blank_lines")
_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Part:
    """What is read of one input: all of it, or a range. `path` None: a Hugging Face dataset."""

    source: int  # its number in data:
    path: Path | None
    start: int = 0  # bytes of a file of lines, row groups of a parquet file
    end: int | None = None  # None: to its end


@dataclass
class ReadCounts:
    """What reading met; `read_part` adds to it as it goes."""

    files: int = 0
    records: int = 0  # lines, rows and whole text files; blank lines are not among them
    documents: int = 0
    text_bytes: int = 0  # of the documents, as UTF-8
    empty: int = 0  # records without text, or with blanks only
    malformed: int = 0
    blank_lines: int = 0
    empty_files: list[str] = field(default_factory=list)
    places: list[str] = field(default_factory=list)  # the first malformed records: `file:line: reason`

    def add_malformed(self, where: str, reason: str) -> None:
        """Count one record that holds no readable text, and keep the place of the first few."""
        self.records += 1
        self.malformed += 1
        if len(self.places) < PLACES_KEPT:
            self.places.append(f"{where}: {reason}")

    def accept(self, text: bytes, where: Callable[[], str]) -> Iterator[bytes]:
        """Count one readable record; give its text unless it is blank."""
        if len(text) > MOST_BYTES:
            self.add_malformed(where(), TOO_LONG)
            return
        self.records += 1
        if not text or text.isspace():
            self.empty += 1
            return
        self.documents += 1
        self.text_bytes += len(text)
        yield text

    def merge(self, other: ReadCounts) -> None:
        """Add what was met in another part, which comes after this one."""
        for name in COUNTED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.empty_files = self.empty_files + other.empty_files
        self.places = (self.places + other.places)[:PLACES_KEPT]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def check_malformed(self, allowed_share: float) -> None:
        """Raise UserError where more than `allowed_share` (0 to 1) of the records are malformed."""
        if self.malformed == 0 or self.malformed <= allowed_share * self.records:
            return
        share = self.malformed / self.records
        more = self.malformed - len(self.places)
        raise UserError(
            f"{self.malformed} of {self.records} records are malformed ({share:.3%}); "
            f"tokenize.max_malformed_share allows {allowed_share:.3%}. Mend them, or raise that key to skip them:\n  "
            + "\n  ".join(self.places + ([f"… and {more} more"] if more else []))
        )

    def __str__(self) -> str:
        return (
            f"{self.files} files, {self.records} records, {self.empty} empty, {self.malformed} malformed, "
            f"{self.blank_lines} blank lines"
        )


def read_part(part: Part, sources: Sequence[DataSource], counts: ReadCounts) -> Iterator[bytes]:
    """Read the documents of one part. Raises UserError, naming the file, where it can't be read to its end."""
    source, path = sources[part.source], part.path
    counts.files += part.start == 0
    if path is None:
        yield from _read_dataset(source, counts)
        return
    kind, compression = format_of(path)
    with _naming(path):
        if path.stat().st_size == 0:
            if kind == "parquet" or compression:
                raise UserError(f"{path}: 0 bytes, which is no {path.suffix} file: was it written whole?")
            counts.empty_files.append(str(path))
        if kind == "text":
            yield from _read_text(path, compression, counts)
        elif kind == "lines":
            yield from _read_lines(part, path, compression, source.text_field, counts)
        else:
            yield from _read_parquet(part, path, source.text_field, counts)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turn what a reading library raises into an error that names the file."""
    try:
        yield
    except OSError as error:
        kind = StorageError if error.errno in (errno.EIO, errno.ESTALE, errno.ETIMEDOUT) else UserError
        raise kind(f"{path}: can't be read to its end: {error.strerror or error}") from error


@contextmanager
def _open(path: Path, compression: str | None) -> Iterator[io.BufferedReader[io.RawIOBase]]:
    """Open the plain bytes of `path`, all members or frames of them. Truncation and a wrong suffix raise OSError."""
    with _raw(path, compression) as stream, io.BufferedReader(stream, _BUFFER_BYTES) as reader:
        found = next((name for magic, name in MAGIC.items() if reader.peek(4).startswith(magic)), None)
        if found:
            inside = "inside it is compressed once more" if compression else "it is compressed"
            raise UserError(f"{path}: {inside} ({found}). Decompress it, or give it the suffix that fits its content")
        yield reader


def _raw(path: Path, compression: str | None) -> io.RawIOBase:
    if compression is None:
        return path.open("rb", buffering=0)
    import pyarrow  # 0.2 s to import, and only needed here

    # it reads every member (gz) and frame (zst), and raises on truncation; tests hold it to that
    stream: io.RawIOBase = pyarrow.input_stream(str(path), compression=compression)
    return stream


def _read_text(path: Path, compression: str | None, counts: ReadCounts) -> Iterator[bytes]:
    with _open(path, compression) as reader:
        text = reader.read(MOST_BYTES + 1)
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        if len(text) <= MOST_BYTES:
            counts.add_malformed(str(path), f"invalid UTF-8 at byte {error.start}")
            return
    yield from counts.accept(text, lambda: str(path))


def _read_lines(
    part: Part, path: Path, compression: str | None, text_field: str, counts: ReadCounts
) -> Iterator[bytes]:
    """Read the lines that begin in the part's range; the last one to its end, wherever that is."""
    place = _Place(path, part.start)
    with _open(path, compression) as reader:
        position = part.start
        if position:  # a line that began before belongs to the part before
            reader.seek(position - 1)
            position += _next_line(reader)[1] - 1
        while part.end is None or position < part.end:
            # bytes end lines at \n only; str would also end them at U+2028, which JSON allows inside a string
            line, size = _next_line(reader)
            if not size:
                return
            position += size
            place.number += 1
            if position == size:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if size > MOST_BYTES:
                counts.add_malformed(place(), TOO_LONG)
                continue
            if not line or line.isspace():
                counts.blank_lines += 1
                continue
            try:
                text = parse_line(line, text_field)
            except ValueError as error:
                counts.add_malformed(place() if len(counts.places) < PLACES_KEPT else "", str(error))
                continue
            yield from counts.accept(text, place)


def _next_line(reader: io.BufferedReader[io.RawIOBase]) -> tuple[bytes, int]:
    """Return a line and its bytes; of one that is longer than MOST_BYTES nothing is kept."""
    line = reader.readline(MOST_BYTES + 1)
    size = len(line)
    if size <= MOST_BYTES:
        return line, size
    while not line.endswith(b"\n") and (line := reader.readline(MOST_BYTES)):
        size += len(line)
    return b"", size


class _Place:
    """Names the line that is read: `file:line`. Where reading began in the middle, the lines before are counted."""

    def __init__(self, path: Path, start: int) -> None:
        self.path, self.start = path, start
        self.number = 0  # of the line, among those of the part

    def __call__(self) -> str:
        return f"{self.path}:{self._before + self.number}"

    @cached_property
    def _before(self) -> int:
        lines, left = 0, self.start
        with self.path.open("rb") as file:
            while left and (block := file.read(min(left, _BUFFER_BYTES))):
                lines += block.count(b"\n")
                left -= len(block)
            if self.start:  # the line that the start lies in
                file.seek(self.start - 1)
                lines += file.read(1) != b"\n"
        return lines


def _refuse_constant(name: str) -> None:
    raise ValueError(f"not JSON: {name}")


# Numbers are read as floats: an integer of 5,000 digits is valid JSON, but Python's int refuses it.
_DECODER = json.JSONDecoder(parse_int=float, parse_constant=_refuse_constant)


def parse_line(line: bytes, text_field: str) -> bytes:
    """Return the text (UTF-8) of one JSON line. Raises ValueError with the reason where there is none."""
    try:
        record = _DECODER.decode(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"invalid UTF-8 at byte {error.start} of the line") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("not readable: nested too deeply") from None
    if not isinstance(record, dict):
        raise ValueError(f"not an object but {_json_type(record)}")
    if text_field not in record:
        raise ValueError(f"no field {text_field!r} (fields: {', '.join(list(record)[:8]) or 'none'})")
    return _to_utf8(record[text_field], text_field)


def _to_utf8(value: object, text_field: str) -> bytes:
    if not isinstance(value, str):
        raise ValueError(f"field {text_field!r} is {_json_type(value)}, not text")
    try:
        return value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"field {text_field!r} holds a lone surrogate at character {error.start}") from None


def _json_type(value: object) -> str:
    names = {type(None): "null", bool: "a boolean", float: "a number", int: "a number", str: "a string", list: "a list"}
    return names.get(type(value), "an object" if isinstance(value, dict) else f"a {type(value).__name__}")


def _read_parquet(part: Part, path: Path, text_field: str, counts: ReadCounts) -> Iterator[bytes]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if text_field not in names:
                raise UserError(f"{path}: no column {text_field!r} (columns: {', '.join(names)}); see data: text_field")
            groups = range(file.num_row_groups)[part.start : part.end]
            row = sum(file.metadata.row_group(number).num_rows for number in range(part.start))
            for batch in file.iter_batches(batch_size=1024, row_groups=groups, columns=[text_field]):
                for value in batch.column(0):
                    row += 1
                    yield from _read_row(value.as_py, f"{path}:{row}", text_field, counts)
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: can't be read as parquet: {error}") from error


def _read_row(get: Any, where: str, text_field: str, counts: ReadCounts) -> Iterator[bytes]:
    """Count the value that `get()` returns; pyarrow checks UTF-8 only there."""
    try:
        text = _to_utf8(get(), text_field)
    except UnicodeDecodeError as error:
        counts.add_malformed(where, f"invalid UTF-8 at byte {error.start} of field {text_field!r}")
        return
    except ValueError as error:
        counts.add_malformed(where, str(error))
        return
    yield from counts.accept(text, lambda: where)


def _read_dataset(source: DataSource, counts: ReadCounts) -> Iterator[bytes]:
    """Stream one split of a Hugging Face dataset; HF_HUB_OFFLINE and the other HF_ variables hold."""
    import datasets

    name = f"{source.dataset}[{source.split}]"
    try:
        rows = iter(
            datasets.load_dataset(
                source.dataset, source.config, split=source.split, revision=source.revision, streaming=True
            )
        )
    except Exception as error:  # the library raises a dozen kinds
        raise _dataset_error(name, error) from error
    row = 0
    while True:
        try:
            record = next(rows, None)
        except Exception as error:
            raise _dataset_error(f"{name}:{row + 1}", error) from error
        if record is None:
            return
        row += 1
        where = f"{name}:{row}"
        if source.text_field not in record:
            counts.add_malformed(where, f"no field {source.text_field!r} (fields: {', '.join(list(record)[:8])})")
            continue
        yield from _read_row(lambda record=record: record[source.text_field], where, source.text_field, counts)


def hub_revision(source: DataSource) -> str | None:
    """Ask the hub which commit a dataset is at now, or its named revision is; None where it does not say."""
    from huggingface_hub import HfApi

    try:
        return HfApi().dataset_info(str(source.dataset), revision=source.revision).sha
    except Exception:  # a folder here, no network, another hub: reading it says what is wrong
        return None


def _dataset_error(where: str, error: Exception) -> UserError:
    kind = NotReadyError if isinstance(error, ConnectionError) else UserError
    return kind(f"dataset {where}: {type(error).__name__}: {error}")
