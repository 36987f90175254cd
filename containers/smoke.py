"""Look at an image from inside: what is in it, and whether the pipeline starts. Prints one line of JSON.

`pipeline image` calls this in the image, with the pipeline's code mounted and on PYTHONPATH.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MARKER = Path("/etc/pipeline-image.json")
STAGES = [f"pipeline.stages.{stage}" for stage in ("preflight", "tokenize", "pretrain", "evaluate", "inference")]
MODULES = ["sentencepiece", "datasets", "numpy", "safetensors", "pipeline.cli.verbs", *STAGES]


def debian_packages() -> dict[str, str]:
    """Read the names and versions of Debian's packages; none where the image is of another family."""
    status = Path("/var/lib/dpkg/status")
    found, name = {}, ""
    for line in status.read_text(encoding="utf-8").splitlines() if status.is_file() else []:
        key, _, value = line.partition(": ")
        if key == "Package":
            name = value
        elif key == "Version":
            found[name] = value
    return found


def python_packages() -> dict[str, str]:
    """Return the names and versions of Python's packages."""
    found = {item.metadata["Name"]: item.version for item in importlib.metadata.distributions()}
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def nccl_version() -> str | None:
    """Return NCCL's version as torch tells it; None where torch was built without."""
    import torch

    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except (AttributeError, RuntimeError):
        return None


def look() -> dict[str, Any]:
    """Import what the stages need; any exception is the image's failure."""
    started = time.perf_counter()
    import torch

    seconds = time.perf_counter() - started
    total = torch.ones(2, 3).sum().item()
    if total != 6:
        raise RuntimeError(f"torch adds six ones to {total}")
    for name in MODULES:
        importlib.import_module(name)
    words = [sys.executable, "-m", "pipeline", "--version"]
    version = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True).stdout.strip()
    cuda = torch.cuda.is_available()
    return {
        "marker": json.loads(MARKER.read_text(encoding="utf-8")),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_import_seconds": round(seconds, 2),
        "cuda": torch.version.cuda,
        "nccl": nccl_version(),
        "gpus": torch.cuda.device_count() if cuda else 0,
        "gpu": torch.cuda.get_device_name(0) if cuda else None,
        "pipeline": version,
        "python_packages": python_packages(),
        "debian_packages": debian_packages(),
    }


if __name__ == "__main__":
    print(json.dumps(look()))
