"""An image that has changed since a Run was made is refused, and an unchanged one is read once."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from pipeline.errors import NotReadyError, UserError
from pipeline.image.check import check_image, image_sha256, noted_path


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "x.sqsh"
    path.write_bytes(b"hsqs" + b"x" * 1000)
    return path


def test_an_unchanged_image_is_read_once(image: Path) -> None:
    expected = hashlib.sha256(image.read_bytes()).hexdigest()
    check_image(image, expected)
    before = image.stat().st_atime_ns
    note = noted_path(image)
    noted = json.loads(note.read_text())
    note.write_text(json.dumps(noted | {"sha256": "f" * 64}))
    assert image_sha256(image) == "f" * 64  # taken from the note, without a look at each byte
    assert image.stat().st_atime_ns == before


def test_an_exchanged_image_of_equal_size_and_time_is_found(image: Path) -> None:
    expected = hashlib.sha256(image.read_bytes()).hexdigest()
    check_image(image, expected)
    times = image.stat().st_atime_ns, image.stat().st_mtime_ns
    image.write_bytes(b"hsqs" + b"y" * 1000)
    os.utime(image, ns=times)
    with pytest.raises(UserError, match="not the image that the Run was made with"):
        check_image(image, expected)


def test_a_changed_image_is_refused(image: Path) -> None:
    expected = hashlib.sha256(image.read_bytes()).hexdigest()
    check_image(image, expected)
    image.write_bytes(b"hsqs" + b"y" * 1001)
    with pytest.raises(UserError, match=r"x\.sqsh: this is not the image that the Run was made with"):
        check_image(image, expected)


def test_a_copied_image_is_read_again_and_taken(image: Path, tmp_path: Path) -> None:
    expected = hashlib.sha256(image.read_bytes()).hexdigest()
    check_image(image, expected)
    os.utime(image, ns=(1, 1))
    check_image(image, expected)


def test_a_missing_image_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotReadyError, match=r"y\.sqsh: there is no such image"):
        check_image(tmp_path / "y.sqsh", "0" * 64)


def test_a_torn_note_is_no_reason_to_fail(image: Path) -> None:
    expected = hashlib.sha256(image.read_bytes()).hexdigest()
    image.with_name(".x.sqsh.checked").write_text("{")
    check_image(image, expected)
