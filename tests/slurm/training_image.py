"""The training image for tests: built by the product, without a registry, and kept from one run of the tests to the next."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from slurm_packages import IMAGE, lacking

PROJECT = Path(__file__).resolve().parents[2]
LIMIT = 900  # seconds: two or three minutes where Debian's packages and Python's are near
KEPT = 14  # days since its last use; each change of the image's inputs makes a new one
OFFLINE = re.compile(r"could not resolve|temporary failure|connection|unable to fetch|timed? ?out", re.IGNORECASE)


class Unavailable(Exception):
    """This machine cannot build the image; the text says why."""


def folder() -> Path:
    """Return where images are kept: outside the repository, of which CI makes a new one each time."""
    named = os.environ.get("PIPELINE_IMAGE_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "pretrain-pipeline" / "images"


def find_or_build() -> Path:
    """Return the image of today's inputs; the product gives it a name by them, and lets it appear whole."""
    if packages := lacking(IMAGE):
        raise Unavailable(f"missing packages; as root: apt-get install {' '.join(packages)}")
    call = [sys.executable, "-m", "pipeline", "image", "--builder", "mmdebstrap", "--output", str(folder()), "--json"]
    done = subprocess.run(call, cwd=PROJECT, capture_output=True, text=True, timeout=LIMIT, check=False)
    if done.returncode:
        said = f"no training image: {done.stderr.strip()}"
        if OFFLINE.search(said):
            raise Unavailable(said)
        raise RuntimeError(said)
    image = Path(json.loads(done.stdout)["path"])
    os.utime(image)
    remove_unused()
    return image


def remove_unused() -> None:
    """Remove images that no run of the tests has used for long, with what lies beside them."""
    for image in folder().glob("*.sqsh"):
        if time.time() - image.stat().st_mtime > KEPT * 86400:
            for path in image.parent.glob(f"{image.stem}.*"):
                path.unlink()
