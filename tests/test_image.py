"""Images are built once, by the builder that is there, tested, and appear whole; the builders are fake commands.

Each test works on a copy of the project, because a build writes down the digest of its base there.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import PROJECT
from packaging.requirements import Requirement

from pipeline.errors import NotReadyError, UserError
from pipeline.image_check import check_image

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
SMOKE = {"torch": "2.13.0", "cuda": None, "debian_packages": {"bash": "5"}, "python_packages": {}}
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
    return Place(tmp_path)


# Which builder


@pytest.mark.parametrize(
    ("here", "taken"),
    [
        ("docker podman buildah enroot mmdebstrap", "docker"),
        ("podman buildah enroot mmdebstrap", "podman"),
        ("buildah enroot mmdebstrap", "buildah"),
        ("enroot mmdebstrap", "enroot"),
    ],
)
def test_the_first_builder_that_is_here_is_taken(place: Place, here: str, taken: str) -> None:
    for name in here.split():
        place.put(name, ENROOT if name == "enroot" else ENGINE)
    assert place.built()["builder"] == taken


def test_an_engine_without_its_daemon_is_passed_over(place: Place) -> None:
    place.put("docker", ENGINE)
    place.put("buildah", ENGINE)
    place.say("no-daemon", "")
    assert place.built()["builder"] == "buildah"


def test_without_a_builder_each_is_named_with_the_reason(place: Place) -> None:
    place.put("docker", ENGINE)
    place.say("no-daemon", "")
    said = place.image(code=3)
    assert "docker: Cannot connect to the daemon" in said
    assert "buildah: no buildah here" in said
    assert "apt-get install mmdebstrap squashfs-tools" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--builder", "kaniko"], "--builder kaniko: no such builder; write one of docker, podman"),
        (["--target", "tpu"], "--target tpu: no such target; write one of cpu, gpu"),
        (["--target", "gpu", "--builder", "mmdebstrap"], "makes the target cpu alone"),
        (["--base", "x@sha256:12", "--builder", "docker"], "sha256:12 is not a digest"),
    ],
)
def test_a_wrong_word_is_named(place: Place, words: list[str], said: str) -> None:
    place.put("docker", ENGINE)
    assert said in place.image(*words, code=2)


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
    assert place.files() == [image.with_suffix(".json").name, image.name]


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
    assert "its torch was built without CUDA" in place.image("--target", "gpu", code=1)
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


# The base


def test_a_bases_digest_is_written_down_once_and_demanded(place: Place) -> None:
    place.put("docker", ENGINE)
    assert "demanded from now on" in place.image()
    assert list(json.loads(place.lock.read_text()).values()) == [A]
    place.say("digest", B)  # the tag has moved
    with (place.project / "containers" / "Dockerfile").open("a") as file:
        file.write("# changed\n")
    assert place.built()["base_digest"] == A
    for call in place.calls("docker", "build "):
        assert f"--build-arg CPU_BASE=python@{A}" in call
    assert len(place.calls("docker", "RepoDigests")) == 1


def test_a_base_that_was_made_here_is_demanded_by_its_id(place: Place) -> None:
    place.put("docker", ENGINE)
    (place.root / "digest").unlink()
    place.say("id", A)
    assert place.built("--base", "localhost/mine:1")["base_digest"] == f"id:{A}"
    assert "CPU_BASE=localhost/mine:1 " in place.calls("docker", "build ")[0]
    place.say("id", B)
    said = place.image("--base", "localhost/mine:1", code=2)
    assert f"id:{B} instead of id:{A}" in said


def test_a_digest_on_the_command_line_is_asked_of_nobody(place: Place) -> None:
    place.put("docker", ENGINE)
    assert place.built("--base", f"example.org:5000/base:1@{B}")["base_digest"] == B
    assert f"CPU_BASE=example.org:5000/base@{B} " in place.calls("docker", "build ")[0]
    assert not place.lock.exists()


def test_a_base_that_nobody_knows_is_an_error(place: Place) -> None:
    place.put("buildah", ENGINE.replace("*FromImageDigest*) cat digest", '*"pull "*) echo unauthorized >&2; exit 1'))
    said = place.image(code=3)
    assert "unauthorized" in said
    assert "log in to the registry" in said


# The builders' own ways


def test_with_enroot_here_an_engines_image_is_imported(place: Place) -> None:
    place.put("docker", ENGINE)
    place.put("enroot", ENROOT)
    assert place.built()["builder"] == "docker"
    assert place.calls("enroot", "dockerd://localhost/pipeline-image:cpu")
    assert "-comp" in (place.root / "options").read_text()
    assert not place.calls("mksquashfs")


def test_without_it_what_enroot_would_write_is_put_into_the_image(place: Place) -> None:
    place.put("podman", ENGINE)
    place.built("--builder", "podman")
    assert [call.rpartition(":")[2] for call in place.calls("podman", "cp ")] == ["/etc/environment", "/etc/rc"]
    assert place.calls("podman", "rm --force c0ffee")
    assert " -tar -all-root " in place.calls("mksquashfs")[0]


def test_buildah_needs_no_daemon_and_no_name_spaces(place: Place) -> None:
    place.put("buildah", ENGINE)
    place.built()
    assert "--storage-driver vfs build --isolation chroot" in place.calls("buildah", "build ")[0]
    assert (place.root / "mounted" / "etc" / "environment").read_text() == "LANG=C.UTF-8\n"
    assert (place.root / "mounted" / "etc" / "rc").exists()
    assert place.calls("buildah", "rm c0ffee")


def test_enroot_builds_on_a_node(place: Place) -> None:
    place.put("enroot", ENROOT)
    place.built()
    asked = [call.split()[0] for call in place.calls("enroot")]
    assert asked == ["digest", "import", "create", "start", "export", "remove", "start"]
    assert place.calls("enroot", f"docker://python:{A}")


def test_mmdebstrap_needs_packages_alone(place: Place, tmp_path: Path) -> None:
    place.put("python-with-pip", 'while [[ $1 != --target ]]; do shift; done; mkdir -p "$2/torch"')
    place.put("mmdebstrap", 'while [[ $1 != bookworm ]]; do shift; done; echo "$SITE $VERSION" >env; touch "$2"')
    output = tmp_path / "x.sqsh"
    place.script("mmdebstrap", "cpu", "bookworm", str(output), str(tmp_path / "work"), "-comp", "zstd")
    (pip,) = place.calls("python-with-pip")
    assert "--require-hashes --only-binary :all:" in pip
    assert "--python-version 3.11 --platform manylinux_2_36_" in pip
    assert (place.root / "env").read_text() == f"{tmp_path}/work/site 3.11\n"
    assert place.calls("mksquashfs") == [f"- {output} -tar -all-root -noappend -no-progress -comp zstd"]


def test_a_sites_pip_conf_is_in_no_layer(place: Place) -> None:
    place.put("docker", ENGINE)
    place.say("pip.conf", "[global]\nindex-url = https://me:hush@example.org/simple\n")
    place.image("--builder", "docker", PIP_CONFIG_FILE=str(place.root / "pip.conf"))
    (call,) = place.calls("docker", "build ")
    assert f"--secret id=pip,src={place.root}/pip.conf" in call
    everything = [path for path in place.root.rglob("*") if path.is_file() and path.name != "pip.conf"]
    assert not [path for path in everything if b"hush" in path.read_bytes()]


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


# Whether it is still the same


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "x.sqsh"
    path.write_bytes(b"hsqs" + b"x" * 1000)
    return path


def test_an_unchanged_image_is_read_once(image: Path) -> None:
    expected = hashlib.sha256(image.read_bytes()).hexdigest()
    check_image(image, expected)
    times = image.stat().st_atime_ns, image.stat().st_mtime_ns
    image.write_bytes(b"hsqs" + b"y" * 1000)
    os.utime(image, ns=times)
    check_image(image, expected)  # same size and time: taken for the same, without a look at each byte


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
