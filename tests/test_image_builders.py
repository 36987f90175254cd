"""Which builder is taken, what each is asked to do, and how a base is held to what it was; they are fake commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from image_place import ENGINE, ENROOT, A, B, Place
from image_place import place as place  # a fixture

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


@pytest.mark.parametrize(
    ("answer", "remedy"),
    [
        ("unauthorized", "log in to the registry"),
        ("pinging container registry example.org: dial tcp: lookup failed", "--builder mmdebstrap"),
    ],
)
def test_a_base_that_nobody_knows_is_an_error(place: Place, answer: str, remedy: str) -> None:
    asked = f'*"pull "*) echo {answer} >&2; exit 1'
    place.put("buildah", ENGINE.replace("*FromImageDigest*) cat digest", asked))
    said = place.image(code=3)
    assert answer in said
    assert remedy in said


# The builders' own ways


def test_with_enroot_here_an_engines_image_is_imported(place: Place) -> None:
    place.put("docker", ENGINE)
    place.put("enroot", ENROOT)
    assert place.built()["builder"] == "docker"
    assert place.calls("enroot", "dockerd://localhost/pipeline-image:cpu-")
    assert "-comp" in (place.root / "options").read_text()
    assert not place.calls("mksquashfs")


@pytest.mark.parametrize(("engine", "removed"), [("docker", "image rm"), ("buildah", "rmi")])
def test_each_build_has_an_image_of_its_own_and_leaves_none(place: Place, engine: str, removed: str) -> None:
    """Under one tag, another build could put its image between this one's build and its export."""
    place.put(engine, ENGINE)
    place.built()
    with (place.project / "containers" / "Dockerfile").open("a") as file:
        file.write("# changed\n")
    place.built()
    tags = [call.partition("--tag ")[2].split()[0] for call in place.calls(engine, "build ")]
    assert len(set(tags)) == 2
    for tag in tags:
        assert place.calls(engine, f"{removed} {tag}")


def test_without_it_what_enroot_would_write_is_put_into_the_image(place: Place) -> None:
    place.put("podman", ENGINE)
    place.built("--builder", "podman")
    assert [call.rpartition(":")[2] for call in place.calls("podman", "cp ")] == ["/etc/environment", "/etc/rc"]
    assert place.calls("podman", "rm --force c0ffee")
    assert " -tar -all-root -root-mode 0755 " in place.calls("mksquashfs")[0]


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
    place.put("tar", "true")
    output = tmp_path / "x.sqsh"
    place.script("mmdebstrap", "cpu", "bookworm", str(output), str(tmp_path / "work"), "-comp", "zstd")
    (pip,) = place.calls("python-with-pip")
    assert "--require-hashes --only-binary :all:" in pip
    assert "--python-version 3.11 --platform manylinux_2_36_" in pip
    assert (place.root / "env").read_text() == f"{tmp_path / 'work' / 'site'} 3.11\n"
    assert place.calls("mksquashfs") == [f"- {output} -tar -all-root -root-mode 0755 -noappend -no-progress -comp zstd"]


def test_a_sites_pip_conf_is_in_no_layer(place: Place) -> None:
    place.put("docker", ENGINE)
    place.say("pip.conf", "[global]\nindex-url = https://me:hush@example.org/simple\n")
    place.image("--builder", "docker", PIP_CONFIG_FILE=str(place.root / "pip.conf"))
    (call,) = place.calls("docker", "build ")
    assert f"--secret id=pip,src={place.root}/pip.conf" in call
    everything = [path for path in place.root.rglob("*") if path.is_file() and path.name != "pip.conf"]
    assert not [path for path in everything if b"hush" in path.read_bytes()]
