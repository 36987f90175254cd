"""Find what there is to read: files, folders, globs, the standard library, and datasets, in one fixed order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.config.sources import find_files, format_of
from pipeline.config.tokenize import DataSource
from pipeline.errors import UserError

__all__ = ["Input", "find_files", "format_of", "list_inputs"]


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
