"""Build the training image: one squashfs file, named by all that it is made from, tested before it appears."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.errors import EXIT_FAILED, UserError
from pipeline.files import TornError, read_object, sha256_file, write_json
from pipeline.image import builders
from pipeline.image.bill import bill_path, make_bill
from pipeline.image.check import record_path
from pipeline.image.inputs import (
    CONTEXT,
    PROJECT,
    SCRATCH,
    TARGETS,
    Inputs,
    default_base,
    image_path,
    lock_digest,
    locked_digest,
    marker,
)
from pipeline.image.smoke import smoke_test
from pipeline.image.squash import SQUASH
from pipeline.run.owner import is_alive, this_process

FOLDER = PROJECT / "images"
Say = Callable[[str], None]


class BuildError(UserError):
    """The builder failed, or what it built does not work."""

    exit_code = EXIT_FAILED


def build(target: str, builder: str | None, base: str | None, folder: Path, say: Say) -> tuple[Path, bool]:
    """Return the path of the image and whether it was built now: it is not where one of the same inputs is there."""
    if target not in TARGETS:
        raise UserError(f"--target {target}: no such target; write one of {', '.join(TARGETS)}")
    folder = folder.absolute()
    chosen = builders.choose(builder, target)
    inputs = find_inputs(target, chosen, base, say)
    image = image_path(folder, inputs)
    if is_complete(image):
        return image, False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _workspace(folder, inputs.name) as (place, work):
            record = _make(inputs, chosen, place, work, say)
            _publish(place / image.name, image, record)
    except OSError as error:
        raise UserError(
            f"{error.filename or folder}: the image cannot be written: {error.strerror or error}"
        ) from error
    return image, True


def find_inputs(target: str, builder: str, base: str | None, say: Say) -> Inputs:
    """Find what the image is to be made from; a base that was never built upon is asked for its digest, once."""
    if builder == "mmdebstrap":
        if base not in (None, SCRATCH):
            raise UserError(
                f"--base {base}: mmdebstrap builds upon Debian {SCRATCH} alone, whose Python the lock is for"
            )
        return Inputs(target, SCRATCH)
    base = base or default_base(target)
    known = locked_digest(base)
    if known is None or known.startswith("id:"):
        found = builders.base_digest(builder, base)
        if known is None:
            say(f"{base} is {found}: written to containers/base.lock.json, and demanded from now on")
            lock_digest(base, found)
        elif found != known:
            raise UserError(
                f"{base}: this is not what containers/base.lock.json says: {found} instead of {known}; "
                "if that is meant, remove its line there"
            )
        known = found
    return Inputs(target, base.partition("@")[0], known)


def is_complete(image: Path) -> bool:
    """Tell whether an image and its record are there, and go together."""
    try:
        record = read_object(record_path(image))
    except TornError:  # built again
        return False
    return image.is_file() and image.stat().st_size == record.get("size")


def _make(inputs: Inputs, builder: str, place: Path, work: Path, say: Say) -> dict[str, Any]:
    """Build and test; return the image's record."""
    started = time.monotonic()
    output = place / f"{inputs.name}.sqsh"
    log = place.parent / f"{inputs.name}.log"
    base = inputs.base if builder == "mmdebstrap" else builders.written_for(builder, inputs.pinned)
    words = ["bash", str(CONTEXT / "build.sh"), builder, inputs.target, base, str(output), str(work), *SQUASH]
    code = builders.run_builder(words, {"IMAGE": marker(inputs)}, log, say)
    if code or not output.is_file():
        said = "\n".join(log.read_text(encoding="utf-8").strip().splitlines()[-builders.LAST_LINES :])
        raise BuildError(
            f"{builder} could not build the image (exit {code}):\n{said}\n"
            f"All of it: {log}\nWhat to do: {builders.remedy(said)}"
        )
    say("testing it")
    try:
        smoke = smoke_test(output, work / "smoke", inputs.target, builder)
    except UserError as error:
        raise BuildError(str(error)) from None
    say("taking its hash")
    log.unlink(missing_ok=True)
    return {
        "image": output.name,
        "target": inputs.target,
        "inputs": inputs.hash(),
        "base": inputs.base,
        "base_digest": inputs.digest or _packages_digest(smoke["debian_packages"]),
        "builder": builder,
        "squashfs": SQUASH,
        "commit": _git("rev-parse", "HEAD"),
        "changed": bool(_git("status", "--porcelain", "--", "containers", "pyproject.toml")),
        "sha256": sha256_file(output),
        "size": output.stat().st_size,
        "seconds": round(time.monotonic() - started, 1),
        "smoke": smoke,
    }


def _publish(built: Path, image: Path, record: dict[str, Any]) -> None:
    """Let the image appear, then its bill, then its record, which says that it is complete."""
    with built.open("rb") as file:
        os.fsync(file.fileno())
    record_path(image).unlink(missing_ok=True)
    os.replace(built, image)
    write_json(bill_path(image), make_bill(record))
    write_json(record_path(image), record)


@contextmanager
def _workspace(folder: Path, name: str) -> Iterator[tuple[Path, Path]]:
    """Yield a folder beside the image, to rename from, and one on a local disk; those of killed builds are removed."""
    for left in folder.glob(".*.building.*"):
        _remove_if_left(left)
    place = Path(tempfile.mkdtemp(prefix=f".{name}.building.", dir=folder))
    work = Path(tempfile.mkdtemp(prefix="pipeline-image."))
    work.chmod(0o755)  # mmdebstrap and name spaces enter it as other users
    write_json(place / "builder.json", this_process() | {"work": str(work)}, durable=False)
    former = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield place, work
    finally:
        signal.signal(signal.SIGTERM, former)
        for path in (work, place):
            shutil.rmtree(path, ignore_errors=True)


def _remove_if_left(place: Path) -> None:
    try:
        builder = read_object(place / "builder.json")
    except TornError:
        builder = {}
    if not (place / "builder.json").exists() or is_alive(builder):
        return
    if (work := Path(str(builder.get("work")))).name.startswith("pipeline-image."):
        shutil.rmtree(work, ignore_errors=True)
    shutil.rmtree(place, ignore_errors=True)


def _packages_digest(packages: dict[str, str]) -> str:
    """Name a base that no registry knows by the packages that it is made of."""
    return f"packages:sha256:{hashlib.sha256(json.dumps(packages, sort_keys=True).encode()).hexdigest()}"


def _git(*words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(PROJECT), *words], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
