"""A copy of the project for builds of images, on a machine whose builders are fake commands."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from micro import PROJECT

A, B = "sha256:" + "a" * 64, "sha256:" + "b" * 64
TOOLS = "bash cat chmod cp dirname env false git install ls mkdir mv rm rmdir sed sleep sort touch true uname".split()

# An engine that remembers what it was asked; the file `digest` says what the base is, `broken` what a build says.
ENGINE = """
case $* in
info) [[ ! -e no-daemon ]] || { echo "Cannot connect to the daemon" >&2; exit 1; } ;;
*RepoDigests*) if [[ -e digest ]]; then echo "base@$(<digest)"; fi ;;
*.Id*) cat id ;;
*Config.Env*) echo LANG=C.UTF-8 ;;
*FromImageDigest*) cat digest ;;
*"build "*)
    if [[ -e broken ]]; then cat broken; exit 1; fi
    if [[ -e slow ]]; then touch building; sleep 60; fi ;;
"create "*) echo c0ffee ;;
*"from "*) echo c0ffee ;;
*"mount c0ffee") mkdir -p "$PWD/mounted/etc"; echo "$PWD/mounted" ;;
"export "*) echo files ;;
esac
"""
MKSQUASHFS = 'if [[ $1 = - ]]; then cat >/dev/null; fi; echo hsqs >"$2"'
# Enters the image: here, says what a good image says.
SMOKE = {
    "torch": "2.13.0",
    "cuda": None,
    "debian_packages": {"bash": "5"},
    "python_packages": {"Typing_Extensions": "4.1"},
}
UNSHARE = f"[[ $* != *smoke.py ]] || echo '{json.dumps(SMOKE)}'"
ENROOT = """
case $1 in
import) echo hsqs >"$3" ;;
export) echo hsqs >"$3" ;;
digest) cat digest ;;
start) if [[ $* = *smoke.py ]]; then echo '{smoke}'; fi ;;
esac
echo "$ENROOT_SQUASH_OPTIONS" >>options
""".replace("{smoke}", json.dumps(SMOKE))


class Place:
    """A copy of the project on a machine that has the commands which a test puts there, and no others."""

    def __init__(self, root: Path) -> None:
        self.root, self.bin, self.images = root, root / "bin", root / "images"
        self.project = root / "project"
        self.bin.mkdir()
        (root / "tmp").mkdir()
        for name in TOOLS:
            (self.bin / name).symlink_to(str(shutil.which(name)))
        ignored = shutil.ignore_patterns("__pycache__", "lm", "stages")
        for name in ("containers", "pipeline"):
            shutil.copytree(PROJECT / name, self.project / name, ignore=ignored)
        shutil.copy(PROJECT / "pyproject.toml", self.project)
        self.lock.unlink(missing_ok=True)
        self.put("unshare", UNSHARE)
        self.put("mksquashfs", MKSQUASHFS)
        self.say("digest", A)

    @property
    def lock(self) -> Path:
        return self.project / "containers" / "base.lock.json"

    def put(self, name: str, body: str) -> None:
        path = self.bin / name
        path.write_text(f'#!/bin/bash\ncd {self.root}\necho "$*" >>{name}.calls\n{body}\n')
        path.chmod(0o755)

    def say(self, name: str, text: str) -> None:
        (self.root / name).write_text(text)

    def calls(self, name: str, part: str = "") -> list[str]:
        path = self.root / f"{name}.calls"
        return [line for line in path.read_text().splitlines() if part in line] if path.exists() else []

    def environment(self, **changes: str) -> dict[str, str]:
        home = {"HOME": str(self.root), "TMPDIR": str(self.root / "tmp"), "PATH": str(self.bin)}
        return home | {"PYTHONPATH": str(self.project), "PYTHONDONTWRITEBYTECODE": "1"} | changes

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "pipeline", "image", "--output", str(self.images), *words]

    def image(self, *words: str, code: int = 0, **changes: str) -> str:
        """Run `pipeline image`, and return what it says."""
        done = subprocess.run(
            self.command(*words), capture_output=True, text=True, cwd=self.root, env=self.environment(**changes),
            timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout if "--json" in words else done.stdout + done.stderr

    def built(self, *words: str) -> dict[str, object]:
        """Run `pipeline image --json`, and return its answer."""
        found: dict[str, object] = json.loads(self.image(*words, "--json"))
        return found

    def files(self) -> list[str]:
        """List all that is beside the images, hidden files included."""
        return sorted(os.listdir(self.images)) if self.images.exists() else []

    def script(self, *words: str, **changes: str) -> None:
        """Run build.sh as a person would."""
        given = {"IMAGE": "{}", "PYTHON": "python-with-pip"} | changes
        line = ["bash", str(self.project / "containers" / "build.sh"), *words]
        subprocess.run(line, check=True, capture_output=True, env=self.environment(**given), timeout=60)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """Return a copy of the project, because a build writes down the digest of its base there."""
    return Place(tmp_path)
