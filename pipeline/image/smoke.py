"""The smoke test of an image: start Python in it, with the pipeline's code mounted, before anybody uses it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from pipeline.errors import NotReadyError, UserError
from pipeline.image.inputs import CONTEXT, PROJECT

SECONDS = 600
PROGRAM = ("python3", "/pipeline/containers/smoke.py")
LAST_LINES = 12


def runner(image: Path, work: Path, engine: str | None) -> list[str]:
    """Return the words before PROGRAM that run it in `image`: by Enroot, in name spaces, or by its builder."""
    if shutil.which("enroot"):
        name = ["start", "--root", "--rw", "--mount", f"{PROJECT}:/pipeline", "--env", "PYTHONPATH=/pipeline"]
        return ["enroot", *name, "--env", "PYTHONDONTWRITEBYTECODE=1", str(image)]
    script = ["bash", str(CONTEXT / "smoke.sh"), str(image), str(PROJECT), str(work)]
    spaces = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--mount"]
    if shutil.which("unshare") and subprocess.run([*spaces, "true"], capture_output=True, check=False).returncode == 0:
        return [*spaces, *script]
    if engine in ("docker", "podman"):
        gpus = ["--gpus", "all"] if shutil.which("nvidia-smi") and engine == "docker" else []
        mounts = ["--volume", f"{PROJECT}:/pipeline:ro", "--env", "PYTHONPATH=/pipeline"]
        return [engine, "run", "--rm", *gpus, *mounts, "--env", "PYTHONDONTWRITEBYTECODE=1"]
    raise NotReadyError(
        "the image cannot be tested here, so it is not published: there is no Enroot, and name spaces are not allowed; "
        "build it as root, or on a node with Enroot"
    )


def smoke_test(image: Path, work: Path, target: str, builder: str) -> dict[str, Any]:
    """Run the smoke test and return what it found; UserError where the image does not do."""
    words = runner(image, work, builder)
    if words[0] in ("docker", "podman"):
        words = [*words, f"localhost/pipeline-image:{target}"]
    try:
        done = subprocess.run([*words, *PROGRAM], capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise UserError(f"the image does not work: its smoke test did not end within {SECONDS} seconds") from None
    last = done.stdout.strip().splitlines()[-1:]
    if done.returncode or not last:
        said = "\n".join(f"  {line}" for line in (done.stderr or done.stdout).strip().splitlines()[-LAST_LINES:])
        raise UserError(f"the image does not work, so it is not published. Its smoke test said:\n{said}")
    found: dict[str, Any] = json.loads(last[0])
    if target == "gpu" and found["cuda"] is None:
        raise UserError("the image does not work, so it is not published: its torch was built without CUDA")
    return found | {"runner": words[0]}
