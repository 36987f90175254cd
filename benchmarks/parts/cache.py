"""The benchmarks' own folder, which git ignores: corpora, and an environment for each peer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CACHE = Path(__file__).resolve().parents[1] / ".cache"


def environment(name: str, *packages: str) -> Path | None:
    """Return the Python of a virtual environment with `packages`, made once; None where they can't be installed."""
    folder = CACHE / "environments" / name
    python, stamp = folder / "bin" / "python", folder / "installed"
    wanted = "\n".join(packages)
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    print(f"installing {' '.join(packages)} into {folder}", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", "virtualenv", "--quiet", "--clear", str(folder)], check=True)
    done = subprocess.run(
        [str(python), "-m", "pip", "install", "--quiet", *packages], check=False, stdout=subprocess.DEVNULL
    )
    if done.returncode:
        print(f"{name} can't be installed here and is left out", file=sys.stderr, flush=True)
        return None
    stamp.write_text(wanted)
    return python
