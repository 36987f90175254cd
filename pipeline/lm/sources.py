"""Find what there is to read: files, folders, globs, the standard library, and datasets, in one fixed order."""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.config_tokenize import DataSource
from pipeline.errors import UserError

PYTHON_STDLIB = "python-stdlib"
STDLIB_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
KINDS = {".txt": "text", ".md": "text", ".py": "text", ".jsonl": "lines", ".parquet": "parquet"}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
FOLDER_SUFFIXES = {".txt", ".md", ".jsonl", ".parquet"}  # code in a folder of text is read only where it is named


@dataclass(frozen=True, slots=True)
class Input:
    """One file, or one Hugging Face dataset (no path)."""

    source: int  # its number in data:
    path: Path | None
    size: int = 0  # bytes
    changed: int = 0  # ns since the epoch


def list_inputs(sources: Sequence[DataSource]) -> list[Input]:
    """List what the sources hold, sorted by path within each source, so that every machine reads in the same order.

    Raises UserError where a source holds nothing that can be read.
    """
    inputs = []
    for number, source in enumerate(sources):
        if source.dataset is not None:
            inputs.append(Input(number, None))
        elif source.path is not None:
            for path in find_files(source.path):
                status = path.stat()
                inputs.append(Input(number, path, status.st_size, status.st_mtime_ns))
    if not inputs:
        raise UserError("data: no source is given. Name files, a folder, a glob or a dataset")
    return inputs


def format_of(path: Path) -> tuple[str, str | None]:
    """Return (text|lines|parquet, gzip|zstd|None) by the suffix. Raises UserError for one that is not known."""
    suffix, compression = _suffixes(path)
    kind = KINDS.get(suffix)
    if kind is None or (kind == "parquet" and compression):  # parquet is compressed inside
        raise UserError(f"{path}: unknown kind of file. Known: {_known_suffixes()}")
    return kind, COMPRESSIONS.get(compression)


def find_files(path: str) -> list[Path]:
    """Return the files that `path` (python-stdlib, file, folder or glob) stands for, sorted.

    Raises UserError where there are none, or where a file that is named by itself has an unknown suffix.
    """
    if path == PYTHON_STDLIB:
        return _find_stdlib()
    if Path(path).is_file():
        format_of(Path(path))
        return [Path(path)]
    if Path(path).is_dir():
        everything = list(_walk(Path(path)))
        found = [file for file in everything if _suffixes(file)[0] in FOLDER_SUFFIXES]
        what = f"in the folder; {', '.join(sorted(FOLDER_SUFFIXES))} are read (also .gz, .zst), name others by a glob"
    elif not glob.has_magic(path):
        raise UserError(f"{path}: no such file or folder (data: path)")
    else:
        matches = glob.glob(path, recursive=True)
        everything = [Path(name) for name in matches if Path(name).is_file()]
        found = [file for file in everything if _suffixes(file)[0] in KINDS]
        what = f"match; known kinds: {_known_suffixes()}"
    if not found:
        raise UserError(f"{path}: too little data: 0 files of a known kind ({len(everything)} files {what})")
    return sorted(found, key=str)


def _suffixes(path: Path) -> tuple[str, str]:
    """Return (".jsonl", ".gz") for `a.jsonl.gz`, (".jsonl", "") for `a.jsonl`."""
    name = path.name.lower()
    compression = Path(name).suffix if Path(name).suffix in COMPRESSIONS else ""
    return Path(name.removesuffix(compression)).suffix, compression


def _known_suffixes() -> str:
    return f"{', '.join(KINDS)}; text and lines also with {' or '.join(COMPRESSIONS)} after them"


def _find_stdlib() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    files = [file for file in _walk(root, STDLIB_LEFT_OUT) if file.suffix == ".py"]
    if not files:
        raise UserError(f"{PYTHON_STDLIB}: no .py files under {root}: this Python has no readable standard library")
    return sorted(files, key=str)


def _walk(root: Path, left_out: Collection[str] = ()) -> Iterator[Path]:
    """Give the files below `root` without hidden ones; links to folders are followed, each folder once.

    Folders named in `left_out` are not entered.
    """
    seen = set()
    for folder, names, files in os.walk(root, followlinks=True):
        status = Path(folder).stat()
        if (status.st_dev, status.st_ino) in seen:  # a link back up, or a second way in
            names.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        names[:] = sorted(name for name in names if not name.startswith(".") and name not in left_out)
        yield from (Path(folder, name) for name in sorted(files) if not name.startswith("."))
