"""References to images: what people write, and what Pyxis and Enroot are given."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.errors import NotReadyError, UserError
from pipeline.image.reference import parse_image, require

HERE = Path("/shared/project")
D = "sha256:" + "0123456789abcdef" * 4

# What is written -> what Pyxis is given.
REGISTRIES = {
    "ubuntu": "ubuntu",
    "ubuntu:24.04": "ubuntu:24.04",
    "team/train:v1": "team/train:v1",
    "library/ubuntu": "library/ubuntu",
    "docker.io/library/ubuntu:24.04": "library/ubuntu:24.04",
    "registry.example.org/team/train:v1": "registry.example.org#team/train:v1",
    "registry.example.org:5000/team/train:v1": "registry.example.org:5000#team/train:v1",
    "registry:5000/train": "registry:5000#train",
    "localhost/train": "localhost#train",
    "localhost:5000/a/b/c:V1.0_x-y": "localhost:5000#a/b/c:V1.0_x-y",
    "docker://registry.example.org/team/train:v1": "registry.example.org#team/train:v1",
    "docker://ubuntu": "ubuntu",
    "registry.example.org#team/train:v1": "registry.example.org#team/train:v1",
    "me@registry.example.org#team/train:v1": "me@registry.example.org#team/train:v1",
    "me@registry.example.org/team/train": "me@registry.example.org#team/train",
    "$oauthtoken@registry.example.org#team/train": "$oauthtoken@registry.example.org#team/train",
    f"ubuntu@{D}": f"ubuntu:{D}",
    f"ubuntu:24.04@{D}": f"ubuntu:{D}",
    f"registry.example.org/team/train@{D}": f"registry.example.org#team/train:{D}",
    f"registry.example.org#team/train:{D}": f"registry.example.org#team/train:{D}",
    "a__b/c--d.e/f_g": "a__b/c--d.e/f_g",
}

FILES = {
    "x.sqsh": "/shared/project/x.sqsh",
    "./x.sqsh": "/shared/project/x.sqsh",
    "images/x.squashfs": "/shared/project/images/x.squashfs",
    "../x.sqsh": "/shared/x.sqsh",
    "/abs/x.sqsh": "/abs/x.sqsh",
    "/abs/no-suffix": "/abs/no-suffix",
    "with blank/x y.sqsh": "/shared/project/with blank/x y.sqsh",
    "-x.sqsh": "/shared/project/-x.sqsh",
    "registry.example.org/x.sqsh": "/shared/project/registry.example.org/x.sqsh",
    "X.SQSH": "/shared/project/X.SQSH",
}

REFUSED = {
    "": "is empty",
    "  ": "is empty",
    "Ubuntu": "upper-case letters in Ubuntu",
    "registry.example.org/Team/train:v1": "write team/train",
    "Team/train": "upper-case letters",
    "ubuntu:": "a tag that is none",
    "ubuntu:a b": "a tag that is none",
    "ubuntu:.x": "a tag that is none",
    "ubuntu:" + "x" * 129: "a tag that is none",
    "ubuntu@sha256:123": "a digest that is none",
    "ubuntu@": "a digest that is none",
    "ubuntu;id": "is not the name of an image",
    "$(id)": "is not the name of an image",
    "-x": "is not the name of an image",
    "a//b": "is not the name of an image",
    "a/": "is not the name of an image",
    "a..b": "is not the name of an image",
    "registry.example.org/": "is not the name of an image",
    "#team/train": "no registry before the #",
    "me@#team/train": "no registry before the #",
    "re gistry.example.org/train": "no host name",
    "a\nb": "control characters",
    "x\n.sqsh": "control characters",
    "https://registry.example.org/train": "none of docker://",
    "oras://registry.example.org/train": "none of docker://",
    "docker://": "is not the name of an image",
    "dockerd://me@registry.example.org#train": "names a user or a digest",
    f"podman://train@{D}": "names a user or a digest",
    "x" * 256: "longer than the 255",
}


@pytest.mark.parametrize("text", REGISTRIES)
def test_a_registrys_image_is_written_for_pyxis(text: str) -> None:
    found = parse_image(text, HERE)
    assert found.pyxis() == REGISTRIES[text]
    assert found.enroot() == f"docker://{REGISTRIES[text]}"
    assert parse_image(found.pyxis(), HERE).pyxis() == found.pyxis()  # what is written for Pyxis reads the same


@pytest.mark.parametrize("text", FILES)
def test_a_file_gets_an_absolute_path(text: str) -> None:
    found = parse_image(text, HERE)
    assert found.kind == "file"
    assert found.pyxis() == found.enroot() == FILES[text]


@pytest.mark.parametrize("text", REFUSED, ids=repr)
def test_what_is_no_reference_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[text]):
        parse_image(text, HERE)


@pytest.mark.parametrize("text", ["dockerd://train:v1", "podman://localhost/train:v1"])
def test_an_engines_image_is_for_enroot_and_not_for_the_nodes(text: str) -> None:
    found = parse_image(text, HERE)
    assert found.enroot() == text
    with pytest.raises(UserError, match=f"enroot import -o NAME.sqsh {text}"):
        found.pyxis()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotReadyError, match=r"x\.sqsh: no image can be read there: No such file"):
        require(parse_image("x.sqsh", tmp_path))


def test_what_is_no_image_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.sqsh").write_bytes(b"hs")
    with pytest.raises(UserError, match="no squashfs file, or only the first part"):
        require(parse_image("x.sqsh", tmp_path))
    with pytest.raises(UserError, match="this is a folder"):
        require(parse_image(str(tmp_path), tmp_path))


def test_an_image_is_taken(tmp_path: Path) -> None:
    (tmp_path / "x.sqsh").write_bytes(b"hsqs and more")
    require(parse_image("x.sqsh", tmp_path))
    require(parse_image("ubuntu", tmp_path))  # nobody asks a registry
