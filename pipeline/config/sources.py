"""Which files hold text, told by their names: what is read of a folder, and what a glob may name."""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Collection, Iterator
from pathlib import Path

from pipeline.errors import UserError

KINDS = {".txt": "text", ".md": "text", ".py": "text", ".jsonl": "lines", ".parquet": "parquet"}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
PYTHON_STDLIB = "python-stdlib"
STDLIB_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
FOLDER_SUFFIXES = {".txt", ".md", ".jsonl", ".parquet"}  # code in a folder of text is read only where it is named


def suffixes(path: Path) -> tuple[str, str]:
    """Return (".jsonl", ".gz") for `a.jsonl.gz`, (".jsonl", "") for `a.jsonl`."""
    name = path.name.lower()
    compression = Path(name).suffix if Path(name).suffix in COMPRESSIONS else ""
    return Path(name.removesuffix(compression)).suffix, compression


def kind_of(path: Path) -> str | None:
    """Return text, lines or parquet; None for a file that is not read."""
    suffix, compression = suffixes(path)
    kind = KINDS.get(suffix)
    return None if kind == "parquet" and compression else kind  # parquet is compressed inside


def in_folder(path: Path) -> bool:
    """Tell whether a file is read where only its folder is named."""
    return suffixes(path)[0] in FOLDER_SUFFIXES and kind_of(path) is not None


def known_suffixes() -> str:
    """List what files may end with."""
    return f"{', '.join(KINDS)}; text and lines also with {' or '.join(COMPRESSIONS)} after them"


def folder_suffixes() -> str:
    """List what files of a folder may end with."""
    return f"{', '.join(sorted(FOLDER_SUFFIXES))} are read (also .gz, .zst), name others by a glob"


def walk(root: Path, left_out: Collection[str] = ()) -> Iterator[Path]:
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
