"""A Run's image on a node's own disk: copied once, verified by its sha256, shared by all Jobs of the user there.

sbatch/lib.sh calls this on the hosts: `python -m pipeline.image.cache name|copy RUN FOLDER`, `copy` once on each node.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.errors import EXIT_DONE, EXIT_NOT_READY, EXIT_USAGE, NotReadyError, UserError
from pipeline.files import atomic_path, read_object
from pipeline.image.check import image_sha256, note_sha256, noted_path
from pipeline.run.folder import Run

UNUSED_SECONDS = 86_400  # after which a copy is removed; what a running container holds open outlives that
SPARE_BYTES = 1 << 30  # left for what else runs on the node
BLOCK = 16 << 20


def copy_path(run: Run, folder: Path) -> Path:
    """Name the copy of the Run's image: by its hash, in a folder that is the user's alone."""
    record = read_object(run.record)
    if "image_sha256" not in record:
        raise UserError(f"{run.record}: the Run was made without the file of an image, so there is none to copy")
    return folder / f"pipeline-images-{os.getuid()}" / f"{record['image_sha256']}.sqsh"


def cache_image(image: Path, copy: Path) -> float | None:
    """Have `copy` be the image, whose hash is its name; return the seconds that took, None where it was there.

    NotReadyError where the node's disk does not do; UserError where the bytes are not those that the name promises.
    """
    expected, started = copy.stem, time.monotonic()
    try:
        with _own_folder(copy.parent):
            if not copy.is_symlink() and copy.exists() and image_sha256(copy) == expected:
                _touch(copy)
                return None
            _remove_unused(copy)
            size, free = image.stat().st_size, shutil.disk_usage(copy.parent).free
            if free < size + SPARE_BYTES:
                raise NotReadyError(f"{copy.parent} has {_gb(free)} free, and {_gb(size + SPARE_BYTES)} are needed")
            with atomic_path(copy) as temporary:
                found = _copy(image, temporary)
                if found != expected:
                    raise UserError(
                        f"{image}: what was read is not the image that the Run was made with: its sha256 is "
                        f"{found[:12]}..., and it was {expected[:12]}...; look at the disk, or build the image again"
                    )
            note_sha256(copy, expected)
    except OSError as error:
        raise NotReadyError(f"{error.filename or copy.parent}: {error.strerror or error}") from error
    return time.monotonic() - started


def stand_in(image: Path, copy: Path) -> None:
    """Let the name of the copy lead to the shared image, where there is no room for a copy.

    OSError or NotReadyError where not even that can be.
    """
    with _own_folder(copy.parent), atomic_path(copy, durable=False) as link:
        link.unlink(missing_ok=True)
        link.symlink_to(image)


@contextmanager
def _own_folder(folder: Path) -> Iterator[None]:
    """Make the user's folder and hold its lock: Jobs that begin on one node at once copy once."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise NotReadyError(f"{folder} is somebody else's; what lies there cannot be trusted")
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _remove_unused(copy: Path) -> None:
    """Remove what killed copies left behind, and images that no Job has begun with for a day."""
    for path in copy.parent.glob(".*.tmp"):
        path.unlink(missing_ok=True)
    for path in copy.parent.glob("*.sqsh"):
        if path != copy and time.time() - path.lstat().st_atime > UNUSED_SECONDS:
            path.unlink(missing_ok=True)
            noted_path(path).unlink(missing_ok=True)


def _touch(copy: Path) -> None:
    """Note a use. The time of change stays: by it a copy that was looked at is known again."""
    os.utime(copy, ns=(time.time_ns(), copy.stat().st_mtime_ns))


def _copy(image: Path, target: Path) -> str:
    digest = hashlib.sha256()
    with image.open("rb") as source, target.open("wb") as file:
        while block := source.read(BLOCK):
            digest.update(block)
            file.write(block)
    return digest.hexdigest()


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"


def _copy_here(run: Run, folder: Path) -> int:
    """Copy on this node; one that has no room says so, and starts from the shared disk."""
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    image, copy = Path(str(read_object(run.record).get("image"))), copy_path(run, folder)
    try:
        seconds = cache_image(image, copy)
    except NotReadyError as error:
        print(f"image: {node} starts from the shared disk: {error}", file=sys.stderr, flush=True)
        run.event("image not copied", node=node, reason=str(error))
        try:
            stand_in(image, copy)
        except (OSError, NotReadyError):
            return EXIT_NOT_READY
        return EXIT_DONE
    if seconds is not None:
        print(f"image: {node} has copied {image.name} to {copy.parent} in {seconds:.1f} s", flush=True)
    return EXIT_DONE


def main(argv: list[str]) -> int:
    """Serve sbatch/lib.sh; NOT_READY tells it to start from the shared image on all nodes."""
    if len(argv) != 3 or argv[0] not in ("name", "copy"):
        print("usage: python -m pipeline.image.cache name|copy RUN FOLDER", file=sys.stderr)
        return EXIT_USAGE
    run, folder = Run(Path(argv[1])), Path(argv[2])
    try:
        if argv[0] == "copy":
            return _copy_here(run, folder)
        print(copy_path(run, folder))
    except UserError as error:
        print(f"image: {error}", file=sys.stderr)
        return error.exit_code
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
