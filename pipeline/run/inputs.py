"""What a Run's tokens were made of, and whether that is still the same: compared by names, sizes and times.

    data/inputs.json, written before the index
    {"format": 1, "files": [[number in data:, path, bytes, mtime in ns, [[first byte, end or null, sha256], …]], …]}
    control/inputs.json      files whose time has changed and whose bytes have not: {path: [bytes, mtime in ns]}

Text that is gone altogether, or that this machine cannot see, does not make tokens stale: they no longer need it.
The standard library is not compared (the stage's Python is another one than the host's), nor are datasets of a hub.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.config.digest import digest_values
from pipeline.config.schema import Config
from pipeline.config.sources import PYTHON_STDLIB, find_files
from pipeline.errors import UserError
from pipeline.files import hash_range, read_object, sha256_file, write_json, write_text
from pipeline.run.folder import Run
from pipeline.run.records import Record, read_record
from pipeline.run.saves import is_trained

FORMAT = 1
NAMED = 5  # differences that a message lists
DIGESTED = {
    "vocab_size", "model_type", "tokenizer", "training_bytes", "validation_fraction", "shard_tokens",
}  # fmt: skip
DIGESTED_OF_SOURCE = {"path", "dataset", "config", "split", "text_field"}


class HashedRange(NamedTuple):
    """The bytes of a file from `start` to before `end` (None: its end), and their hash."""

    start: int
    end: int | None
    sha256: str


class ReadFile(NamedTuple):
    """One file as it was when it was read; without hashes only its size tells of a change."""

    source: int  # its number in data:
    path: Path
    size: int
    changed: int  # ns since the epoch
    hashes: tuple[HashedRange, ...] = ()


def fingerprint(config: Config) -> str:
    """Hash what decides the data's bytes: the sources and the tokenize section without time limits and the like."""
    of_no_effect = config.tokenize.keys_of_no_effect()
    wanted = {
        "data": [digest_values(source, DIGESTED_OF_SOURCE, {"weight"}) for source in config.data],
        "tokenize": digest_values(config.tokenize, DIGESTED, of_no_effect),
    }
    return hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()


def write_inputs(run: Run, files: Sequence[ReadFile]) -> None:
    """Record what the tokens are made of."""
    listed = [[file.source, str(file.path), file.size, file.changed, file.hashes] for file in files]
    write_text(run.inputs, json.dumps({"format": FORMAT, "files": listed}) + "\n")  # names may be no UTF-8
    run.inputs_seen.unlink(missing_ok=True)


def read_inputs(run: Run) -> list[ReadFile]:
    """Return what the tokens were made of; of an older Run what its list of pieces says; empty if nobody knows."""
    record = read_object(run.inputs)
    try:
        if record:
            return [
                ReadFile(source, Path(path), size, changed, tuple(HashedRange(*one) for one in hashes))
                for source, path, size, changed, hashes in record["files"]
            ]
        return _from_pieces(read_object(run.pieces))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise UserError(f"{run.inputs}: not a list of inputs: {error!r}. Remove it to go on without it") from error


def _from_pieces(record: Record) -> list[ReadFile]:
    files = record.get("files", [])
    read = {(source, number) for piece in record.get("pieces", []) for source, number, *_ in piece}
    return [
        ReadFile(source, Path(files[number][0]), *files[number][1:]) for source, number in read if number is not None
    ]


def changed_inputs(run: Run, config: Config) -> list[str]:
    """List what is not as it was when the tokens were made, in words; what changed in time alone is hashed once."""
    recorded = read_inputs(run)
    seen = read_record(run.inputs_seen)
    found: list[str] = []
    for number, source in enumerate(config.data):
        if source.path is None or source.path == PYTHON_STDLIB:
            continue
        then = {file.path: file for file in recorded if file.source == number}
        if then:
            found += _differences(source.path, then, seen)
    if seen != read_record(run.inputs_seen):
        with suppress(OSError):  # a reader of someone else's Run
            write_json(run.inputs_seen, seen)
    return found + _changed_tokenizer(run, config)


def _differences(path: str, then: dict[Path, ReadFile], seen: Record) -> Iterator[str]:
    try:
        now = set(find_files(path))
    except (UserError, OSError):
        return  # gone altogether
    yield from (f"{name} is new" for name in sorted(now - then.keys()))
    yield from (f"{name} is gone" for name in sorted(then.keys() - now))
    for name in sorted(now & then.keys()):
        if (difference := _difference(then[name], seen)) is not None:
            yield difference


def _difference(file: ReadFile, seen: Record) -> str | None:
    try:
        status = file.path.stat()
    except OSError as error:
        return f"{file.path} cannot be read: {error.strerror}"
    if status.st_size != file.size:
        return f"{file.path} has {status.st_size:,} bytes, and had {file.size:,}"
    look = [status.st_size, status.st_mtime_ns]
    if status.st_mtime_ns == file.changed or seen.get(str(file.path)) == look:
        return None
    for start, end, digest in file.hashes:
        if hash_range(file.path, start, end) != digest:
            return f"{file.path} has other bytes"
    seen[str(file.path)] = look
    return None


def _changed_tokenizer(run: Run, config: Config) -> list[str]:
    """Compare the Run's copy of a given tokenizer with the file."""
    given = Path(config.tokenize.tokenizer) if config.tokenize.tokenizer is not None else None
    if given is None or not given.is_file() or not run.tokenizer.is_file():
        return []
    same = sha256_file(given) == sha256_file(run.tokenizer)
    return [] if same else [f"{given} (tokenize.tokenizer) is another one"]


def are_bound(run: Run) -> bool:
    """Tell whether a model depends on the tokens, so that they can no longer be made anew."""
    return run.keep_tokens.exists() or is_trained(run)


def check_inputs(run: Run, config: Config) -> None:
    """Raise UserError where the text has changed since the tokens were made that a model was trained on.

    For a person who submits or resumes. Jobs that are under way go on with the tokens that the model knows.
    """
    if run.keep_tokens.exists() or not run.index.is_file() or not is_trained(run):
        return
    if differences := changed_inputs(run, config):
        raise UserError(
            f"{run.root}: the text has changed since its tokens were made, and its model is trained on them: "
            f"{told(differences)}. Put the former files back. For the changed text take a new name, for example "
            f"name={config.name}-2. To go on with the tokens as they are:\n  touch {run.keep_tokens}"
        )


def told(differences: Sequence[Any]) -> str:
    """Name the first few."""
    more = f" and {len(differences) - NAMED} more" if len(differences) > NAMED else ""
    return "; ".join(map(str, differences[:NAMED])) + more
