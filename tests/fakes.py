"""Commands of Slurm's that a test writes itself: small scripts on PATH, which note each of their calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Fake = Callable[[str, str], None]
COMMANDS = ("sbatch", "squeue", "scontrol", "scancel", "sinfo", "srun", "sacct", "sacctmgr")


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Return a function that puts a command on PATH; it runs in tmp_path and notes each of its calls in NAME.calls."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def write(name: str, body: str) -> None:
        path = folder / name
        path.write_text(f'#!/bin/bash\ncd {tmp_path}\necho "$*" >> {name}.calls\n{body}\n')
        path.chmod(0o755)

    for name in COMMANDS:  # never the machine's own
        write(name, f"echo '{name}: not expected here' >&2; exit 1")
    return write


def calls(name: str) -> list[str]:
    """Return the words of each call of a fake command, as one text."""
    path = Path(f"{name}.calls")
    return path.read_text().splitlines() if path.exists() else []
