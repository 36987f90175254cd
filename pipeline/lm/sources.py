"""Find what there is to read: files, folders, globs, the standard library, and datasets, in one fixed order."""

from __future__ import annotations

import glob
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.config.sources import COMPRESSIONS, folder_suffixes, in_folder, kind_of, known_suffixes, suffixes, walk
from pipeline.config.tokenize import DataSource
from pipeline.errors import UserError

PYTHON_STDLIB = "python-stdlib"
STDLIB_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


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
    kind = kind_of(path)
    if kind is None:
        raise UserError(f"{path}: unknown kind of file. Known: {known_suffixes()}")
    return kind, COMPRESSIONS.get(suffixes(path)[1])


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
        everything = list(walk(Path(path)))
        found = list(filter(in_folder, everything))
        what = f"in the folder; {folder_suffixes()}"
    elif not glob.has_magic(path):
        raise UserError(f"{path}: no such file or folder (data: path)")
    else:
        matches = glob.glob(path, recursive=True)
        everything = [Path(name) for name in matches if Path(name).is_file()]
        found = [file for file in everything if kind_of(file)]
        what = f"match; known kinds: {known_suffixes()}"
    if not found:
        raise UserError(f"{path}: too little data: 0 files of a known kind ({len(everything)} files {what})")
    return sorted(found, key=str)


def _find_stdlib() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    files = [file for file in walk(root, STDLIB_LEFT_OUT) if file.suffix == ".py"]
    if not files:
        raise UserError(f"{PYTHON_STDLIB}: no .py files under {root}: this Python has no readable standard library")
    return sorted(files, key=str)
