"""Which files hold text, told by their names: what is read of a folder, and what a glob may name."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path

KINDS = {".txt": "text", ".md": "text", ".py": "text", ".jsonl": "lines", ".parquet": "parquet"}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
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
