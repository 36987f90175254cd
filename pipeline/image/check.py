"""Whether an image is still the one that it was."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.errors import NotReadyError, UserError
from pipeline.files import read_json, sha256_file, stat_of, write_json


def record_path(image: Path) -> Path:
    """Name the file that says what an image is and when its hash was last taken."""
    return image.with_suffix(".json")


def image_sha256(image: Path) -> str:
    """Return an image's sha256; read whole only where its stat has changed since that was last done.

    NotReadyError where there is no such file.
    """
    try:
        found, known = _look(image), _read(noted_path(image))
        if {key: known.get(key) for key in found} == found and isinstance(known.get("sha256"), str):
            return str(known["sha256"])
        sha256 = sha256_file(image)
    except FileNotFoundError:
        raise NotReadyError(f"{image}: there is no such image; build it, or give the path of one") from None
    except OSError as error:
        raise NotReadyError(f"{image}: the image cannot be read: {error.strerror or error}") from error
    note_sha256(image, sha256, found)
    return sha256


def note_sha256(image: Path, sha256: str, found: dict[str, Any] | None = None) -> None:
    """Write down an image's hash with the stat that it has, or had when it was `found`."""
    with suppress(OSError):  # somebody else's folder: then it is read whole each time
        write_json(noted_path(image), (found or _look(image)) | {"sha256": sha256}, durable=False)


def noted_path(image: Path) -> Path:
    """Name the file beside an image that holds its hash; not its record, which more than one machine may share."""
    return image.with_name(f".{image.name}.checked")


def check_image(image: Path, expected: str) -> None:
    """Refuse an image that is not the expected one; NotReadyError where there is none."""
    found = image_sha256(image)
    if found != expected:
        raise UserError(
            f"{image}: this is not the image that the Run was made with: its sha256 is {found[:12]}..., "
            f"and it was {expected[:12]}...; put the former file back, or make a new Run for this one: name=..."
        )


def _look(image: Path) -> dict[str, Any]:
    # With ctime and inode, which nobody sets: size and mtime alone are what who exchanges a file can make equal.
    return {"stat": stat_of(image)}


def _read(path: Path) -> dict[str, Any]:
    try:
        known = read_json(path)
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}
