"""The names of checkpoint folders. `checkpoints/step-00000200/` is whole when its manifest, written last, is there."""

from __future__ import annotations

import re
from pathlib import Path

MANIFEST = "manifest.json"
PINNED = "pinned"  # an empty file in a checkpoint that retention leaves alone
STEP_FOLDER = re.compile(r"step-(\d{8,})")


def step_name(step: int) -> str:
    """Name the folder of a step; eight digits, so that names sort like numbers for a while."""
    return f"step-{step:08d}"


def list_steps(folder: Path) -> list[int]:
    """List the steps that have a folder with a manifest, in the order of numbers."""
    if not folder.is_dir():
        return []
    return sorted(
        int(match[1])
        for entry in folder.iterdir()
        if (match := STEP_FOLDER.fullmatch(entry.name)) and (entry / MANIFEST).is_file()
    )
