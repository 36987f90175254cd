"""What an image is made from, and the name that follows: unchanged inputs have the same name."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import UserError
from pipeline.files import read_object, sha256_file, write_json
from pipeline.image.squash import SQUASH

PROJECT = Path(__file__).resolve().parents[2]
CONTEXT = PROJECT / "containers"
LOCK = CONTEXT / "base.lock.json"
SCRATCH_BASE = "scratch"  # in the Dockerfile, where a base must be named that is not known here
FILES = ("Dockerfile", "build.sh", "install.sh", "rootfs.sh", "rc", "requirements.txt", "requirements-cpu.txt")
TARGETS = ("cpu", "gpu")
SCRATCH = "bookworm"  # the Debian whose Python is that of requirements-cpu.txt
DIGEST = re.compile(r"(id:)?sha256:[0-9a-f]{64}")


@dataclass(frozen=True)
class Inputs:
    """A target and its base, held to `digest`; None for a base that is made from packages."""

    target: str
    base: str
    digest: str | None = None

    @property
    def pinned(self) -> str:
        """Return the base as a builder is to take it: by its digest, where a registry knows that."""
        if self.digest is None or self.digest.startswith("id:"):
            return self.base
        # Without the tag: not every builder takes both.
        return f"{re.sub(r':[^:/]+$', '', self.base)}@{self.digest}"

    def hash(self) -> str:
        """Hash all that the image depends on."""
        project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        parts = {
            "target": self.target,
            "base": self.base,
            "digest": self.digest,
            "squash": SQUASH,
            "packages": [*project["dependencies"], *project["optional-dependencies"]["train"]],
            "files": {name: sha256_file(CONTEXT / name) for name in FILES},
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    @property
    def name(self) -> str:
        """Return the image's name, without a suffix."""
        return f"pipeline-{self.target}-{self.hash()[:12]}"


def default_base(target: str) -> str:
    """Read a target's base from the Dockerfile."""
    text = (CONTEXT / "Dockerfile").read_text(encoding="utf-8")
    found = re.search(rf"^ARG {target.upper()}_BASE=(\S+)$", text, re.MULTILINE)
    if found is None:
        raise UserError(f"{CONTEXT / 'Dockerfile'}: no line ARG {target.upper()}_BASE=..., so there is no base; add it")
    if found[1] == SCRATCH_BASE:
        raise UserError(
            f"the target {target} has no base of its own, since a site's drivers decide; name an image that holds "
            "torch for CUDA by its tag, such as the PyTorch image of NVIDIA's catalogue (NGC): "
            f"--base REGISTRY/IMAGE:TAG, or write it once into {CONTEXT / 'Dockerfile'} at ARG {target.upper()}_BASE"
        )
    return found[1]


def locked_digest(base: str) -> str | None:
    """Return the digest that a base had when it was first built upon, or that stands in it."""
    name, at, digest = base.partition("@")
    if at:
        if not DIGEST.fullmatch(digest):
            raise UserError(f"--base {base}: {digest} is not a digest; write {name}@sha256: and 64 digits")
        return digest
    found = read_object(LOCK).get(base)
    return found if isinstance(found, str) else None


def lock_digest(base: str, digest: str) -> None:
    """Write down what a base is, to be demanded from now on."""
    write_json(LOCK, dict(sorted((read_object(LOCK) | {base: digest}).items())))


def marker(inputs: Inputs) -> str:
    """Write what the image will say of itself, in /etc/pipeline-image.json."""
    return json.dumps({"image": inputs.name, "target": inputs.target, "inputs": inputs.hash()})


def image_path(folder: Path, inputs: Inputs) -> Path:
    """Name the file of an image; its record lies beside it, .json."""
    return folder / f"{inputs.name}.sqsh"
