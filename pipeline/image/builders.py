"""The programs that can build an image: which of them are here, and how one is run."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from pipeline.errors import NotReadyError, UserError
from pipeline.image.inputs import CONTEXT, DIGEST, PROJECT
from pipeline.image.reference import parse_image

# The order in which they are tried: engines that cache layers first, then what needs no daemon, then no registry.
BUILDERS = ("docker", "podman", "buildah", "enroot", "mmdebstrap")
ENGINE_SECONDS = 20
SBIN = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
LAST_LINES = 12

# What builders say when they fail, and what to do about it.
REMEDIES = [
    (r"no space left on device", "name a folder on a larger disk: TMPDIR=FOLDER, or --output FOLDER"),
    (r"unauthorized|401|access denied|authentication required", "log in to the registry with the builder's own login"),
    (r"do not match the hashes|THESE PACKAGES", "pip found another file than the locked one: bash containers/lock.sh"),
    (r"certificate.verify.failed", "the base does not know the site's certificate authority: --base another one"),
    (r"no matching distribution|could not find a version", "point pip at an index that has it: PIP_CONFIG_FILE=FILE"),
    (r"permission denied.*docker|docker.*permission denied", "ask to be in the group docker, or take another builder"),
    (
        r"could not resolve|timeout|connection refused|unable to fetch|dial tcp|no such host",
        "no registry is reached: --builder mmdebstrap makes the image from packages",
    ),
    (r"unrecognized option|invalid option.*-tar|-tar", "mksquashfs 4.5 or newer is needed (package squashfs-tools)"),
]  # fmt: skip


def missing(builder: str) -> str | None:
    """Say why a builder cannot be used here; None where it can."""
    needed = {"enroot": ["enroot"], "buildah": ["buildah", "mksquashfs"], "mmdebstrap": ["mmdebstrap", "mksquashfs"]}
    lacking = [name for name in needed.get(builder, [builder]) if shutil.which(name, path=SBIN) is None]
    if lacking:
        return f"no {' and no '.join(lacking)} here"
    if builder in ("docker", "podman"):
        try:
            done = subprocess.run([builder, "info"], capture_output=True, timeout=ENGINE_SECONDS, check=False)
        except (subprocess.TimeoutExpired, OSError) as error:
            return f"{builder} info: {error}"
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip().splitlines()
            return said[-1] if said else f"{builder} info ends with {done.returncode}"
        if not any(shutil.which(name, path=SBIN) for name in ("enroot", "mksquashfs")):
            return "neither enroot nor mksquashfs is here to write the file (package squashfs-tools)"
    return None


def choose(wanted: str | None, target: str) -> str:
    """Return the builder to use: the wanted one, or the first that is here. NotReadyError where there is none."""
    if wanted is not None and wanted not in BUILDERS:
        raise UserError(f"--builder {wanted}: no such builder; write one of {', '.join(BUILDERS)}")
    if wanted == "mmdebstrap" and target == "gpu":
        raise UserError("--builder mmdebstrap makes the target cpu alone: torch for GPUs comes with its base")
    candidates = [wanted] if wanted else [name for name in BUILDERS if (name, target) != ("mmdebstrap", "gpu")]
    reasons = {}
    for name in candidates:
        why = missing(name)
        if why is None:
            return name
        reasons[name] = why
    listed = "\n".join(f"  {name}: {why}" for name, why in reasons.items())
    raise NotReadyError(
        f"no image can be built on this machine:\n{listed}\n"
        "Install one, for example: apt-get install mmdebstrap squashfs-tools; or build elsewhere and copy the file"
    )


def written_for(builder: str, base: str) -> str:
    """Write a base as a builder wants it: Enroot has a form of its own."""
    try:
        reference = parse_image(base, PROJECT)
    except ValueError as error:
        raise UserError(f"--base {base} {error}") from None
    return reference.enroot() if builder == "enroot" else base


def base_digest(builder: str, base: str) -> str:
    """Ask what a base is today, by its digest; its registry may be asked."""
    words = ["bash", str(CONTEXT / "build.sh"), "digest", builder, written_for(builder, base)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    found = done.stdout.strip()
    if done.returncode or not DIGEST.fullmatch(found):
        said = "\n".join(done.stderr.strip().splitlines()[-LAST_LINES:])
        raise NotReadyError(
            f"{base}: {builder} cannot tell its digest, so the image would be of nobody knows what:\n{said}\n"
            f"What to do: {remedy(said)}; or name the digest: --base NAME@sha256:..."
        )
    return found


def remedy(said: str) -> str:
    """Find what to do about the words that a builder ended with."""
    for pattern, advice in REMEDIES:
        if re.search(pattern, said, re.IGNORECASE):
            return advice
    return "see above"


def run_builder(words: list[str], environment: Mapping[str, str], log: Path, say: Callable[[str], None]) -> int:
    """Run build.sh, with all that is said written to `log`, and its own lines handed to `say`; return its exit code."""
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
            env=os.environ | {"PATH": SBIN, "PYTHON": sys.executable} | dict(environment), text=True, errors="replace",
        )  # fmt: skip
        try:
            assert process.stdout is not None
            for line in process.stdout:
                file.write(line)
                file.flush()
                if line.startswith("image: "):
                    say(line.removeprefix("image: ").rstrip())
            return process.wait()
        except BaseException:  # Ctrl-C: the builder takes away what it has made, then it is ended
            for number, seconds in ((signal.SIGTERM, 15), (signal.SIGKILL, 5)):
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(seconds)
            raise
