"""Command lines for a person to copy: each works as printed, from the folder it was printed in."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

from pipeline.cluster.caller import caller


def shown(path: Path | str) -> str:
    """Return `path` relative to the current folder where that is shorter, else as it is."""
    text = os.fspath(path)
    try:
        relative = os.path.relpath(text)
    except (ValueError, OSError):  # the current folder is gone
        return text
    return relative if len(relative) < len(text) else text


def python_word() -> str:
    """Name this interpreter in the shortest way that a shell here understands; for a caller elsewhere, its own."""
    if there := caller():
        return there.python
    for word in ("python", "python3"):
        # Compared unresolved: in a virtual environment the link, not its target, knows the packages.
        if shutil.which(word) == sys.executable:
            return word
    return shown(sys.executable)


def command(*words: Path | str) -> str:
    """Return the shell line `PYTHON -m pipeline WORDS`; paths among the words are shortened like the interpreter's.

    For a caller elsewhere it works on the caller's machine, where the Run's folder is another one.
    """
    texts = [_path(word) if isinstance(word, Path) else word for word in words]
    return shlex.join([python_word(), "-m", "pipeline", *texts])


def _path(path: Path) -> str:
    there = caller()
    return there.here if there and os.fspath(path) == there.there else shown(path)


def again(*words: str) -> str:
    """Return the very command line that this process was called with, and `words` after it."""
    return command(*sys.argv[1:], *words)
