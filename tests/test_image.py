"""An image is built once, tested, and appears whole; its builders are fake commands."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import PROJECT
from image_place import ENGINE, A, Place
from image_place import place as place  # a fixture
from packaging.requirements import Requirement

# What comes out


def test_the_record_says_what_the_image_is(place: Place) -> None:
    place.put("docker", ENGINE)
    found = place.built()
    image = Path(str(found["path"]))
    record = json.loads(image.with_suffix(".json").read_text())
    assert found == {"path": str(image), "built": True} | record
    assert re.fullmatch(r"pipeline-cpu-[0-9a-f]{12}\.sqsh", image.name)
    assert record["inputs"].startswith(image.stem.rpartition("-")[2])
    assert record["sha256"] == hashlib.sha256(image.read_bytes()).hexdigest()
    assert record["size"] == image.stat().st_size
    assert (record["base_digest"], record["target"], record["smoke"]["torch"]) == (A, "cpu", "2.13.0")
    assert place.files() == [image.with_suffix(".cdx.json").name, image.with_suffix(".json").name, image.name]
    bill = json.loads(image.with_suffix(".cdx.json").read_text())
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.5")
    assert [part["purl"] for part in bill["components"]] == ["pkg:deb/debian/bash@5", "pkg:pypi/typing-extensions@4.1"]
    assert bill["metadata"]["component"]["hashes"] == [
        {"alg": "SHA-256", "content": hashlib.sha256(image.read_bytes()).hexdigest()}
    ]


def test_unchanged_inputs_build_nothing(place: Place) -> None:
    place.put("docker", ENGINE)
    first = place.built()
    assert "nothing to build" in place.image()
    second = place.built()
    assert (first["built"], second["built"]) == (True, False)
    assert second["path"] == first["path"]
    assert len(place.calls("docker", "build ")) == 1


@pytest.mark.parametrize("name", ["Dockerfile", "requirements.txt", "requirements-cpu.txt", "install.sh"])
def test_a_changed_file_is_another_image(place: Place, name: str) -> None:
    place.put("docker", ENGINE)
    first = place.built()
    with (place.project / "containers" / name).open("a") as file:
        file.write("# changed\n")
    assert place.built()["path"] != first["path"]


def test_so_is_a_changed_requirement_of_training_and_of_nothing_else(place: Place) -> None:
    place.put("docker", ENGINE)
    project = place.project / "pyproject.toml"
    paths = [place.built()["path"]]
    for old, new in (("ruff==", "ruff=="), ("line-length = 120", "line-length = 119"), ("numpy>=1.26", "numpy>=1.27")):
        project.write_text(project.read_text().replace(old, new))
        paths.append(place.built()["path"])
    assert paths[0] == paths[1] == paths[2] != paths[3]


def test_a_torn_image_is_built_again(place: Place) -> None:
    place.put("docker", ENGINE)
    image = Path(str(place.built()["path"]))
    image.write_bytes(b"hs")
    assert place.built()["built"] is True
    assert image.read_bytes() == b"hsqs\n"


# What must not come out


@pytest.mark.parametrize(
    ("broken", "remedy"),
    [
        ("write /x: no space left on device", "TMPDIR=FOLDER"),
        ("401 Unauthorized", "log in to the registry"),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES", "containers/lock.sh"),
        ("SSL: CERTIFICATE_VERIFY_FAILED", "certificate authority"),
        ("something else", "see above"),
    ],
)
def test_a_build_that_fails_leaves_its_log_alone(place: Place, broken: str, remedy: str) -> None:
    place.put("docker", ENGINE)
    place.say("broken", broken)
    said = place.image(code=1)
    assert broken in said
    assert remedy in said
    (log,) = place.files()
    assert broken in (place.images / log).read_text()
    assert os.listdir(place.root / "tmp") == []


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("echo \"ModuleNotFoundError: No module named 'torch'\" >&2; exit 1", "No module named 'torch'"),
        ("true", "does not work"),
    ],
)
def test_an_image_that_does_not_work_is_not_published(place: Place, answer: str, said: str) -> None:
    place.put("docker", ENGINE)
    place.put("unshare", f"if [[ $* = *smoke.py ]]; then {answer}; fi")
    assert said in place.image(code=1)
    assert not list(place.images.glob("*.sqsh"))


def test_an_image_for_gpus_has_a_torch_for_gpus(place: Place) -> None:
    place.put("docker", ENGINE)
    assert "--base REGISTRY/IMAGE:TAG" in place.image("--target", "gpu", code=2)
    named = ("--target", "gpu", "--base", "registry.example.org/team/pytorch:v1")
    assert "its torch was built without CUDA" in place.image(*named, code=1)
    assert not list(place.images.glob("*.sqsh"))


def started(place: Place) -> subprocess.Popen[str]:
    """Start a build and wait until the builder is at it."""
    place.put("docker", ENGINE)
    place.say("slow", "")
    process = subprocess.Popen(
        place.command(), text=True, stderr=subprocess.PIPE, cwd=place.root, env=place.environment()
    )
    until(lambda: (place.root / "building").exists())
    (place.root / "slow").unlink()
    return process


def until(happened: Callable[[], bool]) -> None:
    for _ in range(600):
        if happened():
            return
        time.sleep(0.05)
    raise AssertionError("it has not happened within 30 seconds")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_build_that_is_stopped_leaves_nothing(place: Place, number: signal.Signals) -> None:
    process = started(place)
    process.send_signal(number)
    assert process.wait(30) == 128 + number
    assert [name for name in place.files() if not name.endswith(".log")] == []
    assert os.listdir(place.root / "tmp") == []


def test_what_a_killed_build_leaves_is_removed_by_the_next(place: Place) -> None:
    process = started(place)
    process.kill()
    process.wait(30)
    (left,) = [name for name in place.files() if name.startswith(".")]
    assert len(os.listdir(place.root / "tmp")) == 1
    assert place.built()["built"] is True
    assert left not in place.files()
    assert os.listdir(place.root / "tmp") == []


def test_the_folder_of_a_build_that_lives_is_left_alone(place: Place) -> None:
    process = started(place)
    assert place.built()["built"] is True
    assert [name for name in place.files() if name.startswith(".")]
    process.terminate()
    process.wait(30)


# What is shipped


def locked() -> dict[str, str]:
    """Read the versions of requirements.txt and requirements-cpu.txt; each must have hashes."""
    found = {}
    for name in ("requirements.txt", "requirements-cpu.txt"):
        text = (PROJECT / "containers" / name).read_text()
        for entry in re.split(r"(?<!\\)\n", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)):
            if entry.strip():
                assert "--hash=sha256:" in entry, entry
                package, _, version = entry.split()[0].partition("==")
                found[package] = version
    return found


def test_the_locked_packages_are_those_that_training_needs() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    versions = locked()
    for text in [*project["dependencies"], *project["optional-dependencies"]["train"]]:
        wanted = Requirement(text)
        assert wanted.specifier.contains(versions[wanted.name]), f"{text}: write them anew: bash containers/lock.sh"


def test_a_base_with_torch_keeps_what_it_has() -> None:
    names = re.findall(r"^([a-z0-9-]+)==", (PROJECT / "containers" / "requirements.txt").read_text(), re.MULTILINE)
    assert "datasets" in names
    assert not {"torch", "numpy", "triton"} & set(names)
