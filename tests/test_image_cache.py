"""An image is copied to a node's own disk once and verified; a node that has no room starts from the shared one."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import PROJECT, environment

from pipeline.errors import NotReadyError, UserError
from pipeline.files import read_lines, write_json
from pipeline.image.cache import cache_image, copy_path, stand_in
from pipeline.run.folder import Run

BYTES = b"hsqs" + b"x" * 1000


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A Run that was made with an image."""
    run = Run(tmp_path / "run")
    run.root.mkdir()
    image = tmp_path / "train.sqsh"
    image.write_bytes(BYTES)
    write_json(run.record, {"image": str(image), "image_sha256": hashlib.sha256(BYTES).hexdigest()})
    return run


@pytest.fixture
def image(run: Run, tmp_path: Path) -> Path:
    return tmp_path / "train.sqsh"


@pytest.fixture
def copy(run: Run, tmp_path: Path) -> Path:
    return copy_path(run, tmp_path / "local")


def call(run: Run, folder: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "pipeline.image.cache", "copy", str(run.root), str(folder)]
    env = environment(SLURMD_NODENAME="n7")
    return subprocess.run(words, capture_output=True, text=True, env=env, timeout=30, check=False)


def test_it_is_copied_once_into_a_folder_that_is_the_users_alone(image: Path, copy: Path) -> None:
    assert cache_image(image, copy) is not None
    assert copy.read_bytes() == BYTES
    assert copy.parent.stat().st_mode & 0o777 == 0o700
    first = copy.stat().st_ino
    assert cache_image(image, copy) is None
    assert copy.stat().st_ino == first


def test_a_copy_that_is_damaged_is_made_anew(image: Path, copy: Path) -> None:
    cache_image(image, copy)
    copy.write_bytes(BYTES[:-1])
    assert cache_image(image, copy) is not None
    assert copy.read_bytes() == BYTES


def test_bytes_that_are_not_the_runs_are_refused_and_leave_nothing(image: Path, copy: Path) -> None:
    image.write_bytes(BYTES + b"y")
    with pytest.raises(UserError, match=r"train\.sqsh: what was read is not the image that the Run was made with"):
        cache_image(image, copy)
    assert [path.name for path in copy.parent.iterdir()] == ["lock"]


def test_what_was_not_used_for_a_day_is_removed_and_the_rest_stays(image: Path, copy: Path) -> None:
    cache_image(image, copy)
    hours = {"left.sqsh": 25, "other.sqsh": 23}
    for name, age in hours.items():
        path = copy.with_name(name)
        path.write_bytes(BYTES)
        os.utime(path, (time.time() - age * 3600, time.time()))
    copy.with_name(".killed.sqsh.1.tmp").touch()
    copy.unlink()
    cache_image(image, copy)
    assert sorted(path.name for path in copy.parent.glob("*.sqsh")) == sorted([copy.name, "other.sqsh"])
    assert not list(copy.parent.glob("*.tmp"))


def test_a_use_is_noted_without_a_change_to_the_copy(image: Path, copy: Path) -> None:
    cache_image(image, copy)
    changed = copy.stat().st_mtime_ns
    os.utime(copy, ns=(1, changed))
    assert cache_image(image, copy) is None
    assert copy.stat().st_atime > time.time() - 60
    assert copy.stat().st_mtime_ns == changed


def test_a_node_without_room_says_so_and_starts_from_the_shared_disk(run: Run, image: Path, copy: Path) -> None:
    os.truncate(image, 1 << 42)  # holes: larger than the disk, and takes none of it
    done = call(run, copy.parent.parent)
    assert done.returncode == 0, done.stderr
    assert "image: n7 starts from the shared disk" in done.stderr
    assert "GB free, and 4399.1 GB are needed" in done.stderr
    assert os.readlink(copy) == str(image)
    (event,) = read_lines(run.events)
    assert (event["event"], event["node"]) == ("image not copied", "n7")
    image.write_bytes(BYTES)  # there is room again
    assert call(run, copy.parent.parent).returncode == 0
    assert not copy.is_symlink()


def test_a_folder_that_cannot_be_made_sends_all_nodes_to_the_shared_disk(run: Run, image: Path) -> None:
    done = call(run, image / "local")
    assert done.returncode == 3
    assert "n7 starts from the shared disk" in done.stderr


def test_another_users_folder_is_not_trusted(image: Path, copy: Path, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    copy.parent.parent.mkdir()
    copy.parent.symlink_to(tmp_path / "theirs")
    for act in (cache_image, stand_in):
        with pytest.raises(NotReadyError, match="is somebody else's"):
            act(image, copy)
    assert not list((tmp_path / "theirs").iterdir())


def test_a_run_without_the_file_of_an_image_has_none_to_copy(run: Run) -> None:
    write_json(run.record, {})
    with pytest.raises(UserError, match="made without the file of an image"):
        copy_path(run, Path("/local"))


# The job script's part

SCRIPT = """\
set -euo pipefail
run=$1 SCHEDULER=local PYTHON=$2 IMAGE_CACHE=$3
CACHE_IMAGE=("$PYTHON" -m pipeline.image.cache)
PREFLIGHT=()
LAUNCH=(srun --container-image=/shared/train.sqsh "--container-mounts=/a b:/a b:ro")
source "$4"
begin evaluate TERM
printf '%s\\n' "${LAUNCH[@]}"
"""


def launched(run: Run, folder: Path) -> list[str]:
    words = ["bash", "-c", SCRIPT, "bash", run.root, sys.executable, folder, PROJECT / "sbatch" / "lib.sh"]
    done = subprocess.run(words, capture_output=True, text=True, env=environment(), timeout=30, check=True)
    return [line for line in done.stdout.splitlines() if not line.startswith("image: ")]


def test_steps_start_from_the_copy(run: Run, copy: Path) -> None:
    wanted = ["srun", f"--container-image={copy}", "--container-mounts=/a b:/a b:ro"]
    assert launched(run, copy.parent.parent) == wanted


def test_steps_start_from_the_shared_image_where_a_node_has_no_place(run: Run, image: Path) -> None:
    assert launched(run, image)[1] == "--container-image=/shared/train.sqsh"
