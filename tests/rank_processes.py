"""Start a script of these tests as the ranks of one job, without a launcher."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from conftest import PROJECT, environment


def run_ranks(script: str, world_size: int, root: Path, *, seconds: float = 120) -> None:
    """Run a script of tests/ on `world_size` processes: STORE RANK WORLD_SIZE ROOT; show the output of those that fail."""
    command = [sys.executable, str(PROJECT / "tests" / script), str(root / f"store{world_size}")]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(world_size), str(root)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, env=environment(PYTHONPATH=str(PROJECT)),
        )
        for rank in range(world_size)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=seconds)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * world_size, "\n".join(outputs)
