"""The sessions call the right verb in the caller's folder, and install once; the environment's Python is a fake."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import PROJECT, environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LOCKED = re.compile(r"^([\w.-]+)==(\S+)((?: \\\n +--hash=sha256:[0-9a-f]{64})+)$", re.M)
EXTRAS = ("train", "report", "test", "lint")

FAKE_PYTHON = """#!/bin/sh
echo "in $PWD: $*" >> {log}
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Copy the noxfile beside an environment whose interpreter only writes down how it was called."""
    root = tmp_path / "project"
    (root / ".nox" / "pipeline" / "bin").mkdir(parents=True)
    python = root / ".nox" / "pipeline" / "bin" / "python"
    python.write_text(FAKE_PYTHON.format(log=tmp_path / "calls"))
    python.chmod(0o755)
    for name in ("noxfile.py", "pyproject.toml", "requirements.lock.txt"):
        shutil.copy(PROJECT / name, root / name)
    return root


def nox(project: Path, *words: str, folder: Path | None = None, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "nox", "-f", str(project / "noxfile.py"), *words],
        capture_output=True, text=True, cwd=folder or project, env=environment(**changes), timeout=60, check=False,
    )  # fmt: skip


def calls(project: Path) -> list[str]:
    return (project.parent / "calls").read_text().splitlines()


def test_it_installs_once_and_again_when_the_packages_change(project: Path) -> None:
    for _ in range(2):
        assert nox(project, "-s", "pretrain").returncode == 0
    packages, itself = (call for call in calls(project) if "pip install" in call)
    assert packages.endswith(f"--no-deps --require-hashes -r {project / 'requirements.lock.txt'}")
    assert itself.endswith(f"--no-build-isolation -e {project}[train,report,test,lint]")
    for changed, times in (("pyproject.toml", 4), ("requirements.lock.txt", 6)):
        (project / changed).write_text((project / changed).read_text() + "\n# changed\n")
        nox(project, "-s", "pretrain")
        assert sum("pip install" in call for call in calls(project)) == times


def test_a_site_whose_index_lacks_those_versions_installs_without_the_lock(project: Path) -> None:
    assert nox(project, "-s", "pretrain", PIPELINE_UNLOCKED="1").returncode == 0
    (alone,) = (call for call in calls(project) if "pip install" in call)
    assert alone.endswith(f"pip install --quiet -e {project}[train,report,test,lint]")


def test_the_lock_has_hashes_and_what_is_asked_for_by_version() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    text = (PROJECT / "requirements.lock.txt").read_text()
    locked = {name: (version, hashes) for name, version, hashes in LOCKED.findall(text)}
    assert text.count("==") == len(locked)  # each has hashes
    extras = project["project"]["optional-dependencies"]
    named = [*project["project"]["dependencies"], *(one for extra in EXTRAS for one in extras[extra])]
    for requirement in [*map(Requirement, named), *map(Requirement, project["build-system"]["requires"])]:
        if requirement.name != "torch":  # its build differs by index, so its version alone is pinned
            assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)][0]), requirement
    assert "torch" not in locked
    image = (PROJECT / "containers" / "requirements.txt").read_text()
    assert {name: version for name, version, _ in LOCKED.findall(image)}.items() <= {
        name: version for name, (version, _) in locked.items()
    }.items()


def test_what_ci_runs_is_named_by_commit() -> None:
    text = (PROJECT / ".github" / "workflows" / "ci.yml").read_text()
    used = re.findall(r"uses: (\S+)", text)
    assert used
    assert all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", one) for one in used)
    assert text.count("actions/checkout@") == text.count("persist-credentials: false")


def test_relative_paths_mean_the_folder_it_is_called_from(project: Path, tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    result = nox(project, "-s", "pretrain", "--", "mine.yaml", "seed=3", folder=folder)
    assert result.returncode == 0, result.stderr
    assert calls(project)[-1] == f"in {folder}: -P -m pipeline submit mine.yaml seed=3"


@pytest.mark.parametrize("stage", ["preflight", "tokenize", "evaluate", "inference"])
def test_a_stage_alone(project: Path, stage: str) -> None:
    assert nox(project, "-s", stage, "--", "runs/x").returncode == 0
    assert calls(project)[-1].endswith(f"-m pipeline submit --only {stage} runs/x")


def test_the_image(project: Path) -> None:
    assert nox(project, "-s", "image", "--", "--target", "gpu").returncode == 0
    assert calls(project)[-1].endswith("-m pipeline image --target gpu")


def test_smoke_sees_to_the_packages_and_then_tests_by_name(project: Path) -> None:
    assert nox(project, "-s", "smoke", "--", "-k", "requeue").returncode == 0
    packages, tests = calls(project)[-2:]
    assert packages.endswith(": tests/slurm/slurm_packages.py")
    assert tests.endswith(": -m pytest tests/slurm -n 2 --dist loadfile -vv -k requeue")


@pytest.mark.parametrize("changes", [{"UV_PYTHON": "3.9"}, {"NOXFORCE_VENV_BACKEND": "uv"}, {"PATH": "/usr/bin:/bin"}])
def test_the_users_environment_does_not_choose_the_interpreter(project: Path, changes: dict[str, str]) -> None:
    assert nox(project, "-s", "pretrain", **changes).returncode == 0
    assert calls(project)[-1].endswith("-P -m pipeline submit")


def test_the_list_says_what_each_session_does(project: Path) -> None:
    listed = nox(project, "--list").stdout
    for session in ("pretrain", "preflight", "tokenize", "evaluate", "inference", "tests", "smoke", "lint", "faults"):
        assert f"{session} -> " in listed
