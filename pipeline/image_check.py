"""Whether an image is still the one that it was."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.errors import NotReadyError, UserError
from pipeline.files import read_json, sha256_file, write_json


def record_path(image: Path) -> Path:
    """Name the file that says what an image is and when its hash was last taken."""
    return image.with_suffix(".json")


def image_sha256(image: Path) -> str:
    """Return an image's sha256; read whole only where its size or time have changed since that was last done.

    NotReadyError where there is no such file.
    """
    noted = image.with_name(f".{image.name}.checked")  # not in the record, which more than one machine may share
    try:
        found: dict[str, Any] = {"size": image.stat().st_size, "mtime_ns": image.stat().st_mtime_ns}
        known = _read(noted)
        if {key: known.get(key) for key in found} == found and isinstance(known.get("sha256"), str):
            return str(known["sha256"])
        found["sha256"] = sha256_file(image)
    except FileNotFoundError:
        raise NotReadyError(f"{image}: there is no such image; build it, or give the path of one") from None
    except OSError as error:
        raise NotReadyError(f"{image}: the image cannot be read: {error.strerror or error}") from error
    with suppress(OSError):  # somebody else's folder: then it is read whole each time
        write_json(noted, found, durable=False)
    return str(found["sha256"])


def check_image(image: Path, expected: str) -> None:
    """Refuse an image that is not the expected one; NotReadyError where there is none."""
    found = image_sha256(image)
    if found != expected:
        raise UserError(
            f"{image}: this is not the image that the Run was made with: its sha256 is {found[:12]}..., "
            f"and it was {expected[:12]}...; put the former file back, or make a new Run for this one: name=..."
        )


def _read(path: Path) -> dict[str, Any]:
    try:
        known = read_json(path)
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}
