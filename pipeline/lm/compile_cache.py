"""The compiler's cache of a Run, which a kill in the middle of compiling must not spoil.

torch.compile has libraries written in place: one that was cut short would be found by every later attempt, which would
die of it (`ImportError: file too short`). So the cache counts only while it bears a stamp, which is taken away at the
start and set again after the first step, when every rank has compiled what it needs.
"""

from __future__ import annotations

import shutil
from pathlib import Path

STAMP = "whole"


def begin_compiling(folder: Path) -> None:
    """Take the stamp away; drop a cache that bears none. Called on rank 0 before any rank compiles."""
    if folder.is_dir() and not (folder / STAMP).is_file():
        print(f"{folder}: an attempt ended while it compiled; compiled anew")
        shutil.rmtree(folder, ignore_errors=True)
    (folder / STAMP).unlink(missing_ok=True)


def keep_compiled(folder: Path) -> None:
    """Set the stamp. Called on rank 0 after the first step of all ranks; without compilation there is no folder."""
    if folder.is_dir():
        (folder / STAMP).touch()
