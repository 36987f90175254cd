"""Runs that version 0.1.0 made are still read, and go on: `tests/fixtures/run-0.1.0` holds two of them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import fake_slurm
import pytest

from pipeline.config.load import load_run_config
from pipeline.files import read_json, write_json
from pipeline.run.folder import Run
from pipeline.run.inputs import fingerprint

OLD = Path(__file__).parent / "fixtures" / "run-0.1.0"
PROJECT = Path(__file__).resolve().parents[1]
Pipeline = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """Copy both Runs, as if they had been made in this place by this interpreter; return the folder with them."""
    folder = tmp_path / "runs"
    shutil.copytree(OLD, folder)
    for path in filter(Path.is_file, folder.rglob("*")):
        text = path.read_bytes()
        moved = text.replace(b"/recorded/run-0.1.0", bytes(folder)).replace(
            b"/recorded/python", sys.executable.encode()
        )
        if moved != text:
            path.write_bytes(moved)
    for name in ("local", "slurm"):
        index = read_json(folder / name / "data" / "index.json")
        # The config's part of it holds the path of the text, which is another one here.
        write_json(
            folder / name / "data" / "index.json",
            index | {"inputs": fingerprint(load_run_config(Run(folder / name).config))},
        )
        for code in ("pipeline", "sbatch"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(PROJECT / code, folder / name / "snapshot" / code, ignore=ignored)
    return folder


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a Slurm that has forgotten all Jobs of the old Run."""
    return fake_slurm.install(tmp_path / "slurm")


def test_status_of_a_complete_local_run(old: Path, pipeline: Pipeline) -> None:
    told = pipeline("status", old / "local", "--json")
    status = json.loads(told.stdout)
    assert (status["state"], status["step"], status["max_steps"]) == ("completed", 40, 40), told.stderr
    assert [(job["stage"], job["state"]) for job in status["jobs"]] == [
        ("tokenize", "completed"), ("pretrain", "completed"), ("evaluate", "completed"), ("inference", "completed"),
    ]  # fmt: skip


def test_status_of_a_stopped_slurm_run(old: Path, pipeline: Pipeline, slurm: dict[str, str]) -> None:
    told = pipeline("status", old / "slurm", "--json", **slurm)
    status = json.loads(told.stdout)
    assert (status["state"], status["max_steps"]) == ("stopped", 40), told.stderr
    segments = {job["job_id"]: job for job in status["jobs"] if job["stage"] == "pretrain"}
    assert [segments[job_id]["state"] for job_id in ("2", "3", "4")] == ["stopped", "failed", "stopped"], segments
    assert "n1, n2" in segments["3"]["reason"]  # lost, and where it ran
    beside = [job["job_id"] for job in status["jobs"] if job["stage"] == "evaluate"]
    assert "10" in beside  # the newest evaluate Job beside training
    assert status["goodput"] is not None
    shown = pipeline("status", old / "slurm", **slurm)
    assert "control/stop" in shown.stdout
    assert "bits per byte" in shown.stdout


@pytest.mark.parametrize("name", ["local", "slurm"])
def test_report_and_log(old: Path, pipeline: Pipeline, slurm: dict[str, str], name: str) -> None:
    done = pipeline("report", old / name, **slurm)
    assert done.returncode == 0, done.stderr
    assert f"<title>{name}" in Run(old / name).report.read_text()
    assert pipeline("logs", old / name, **slurm).returncode == 0


def test_compare(old: Path, pipeline: Pipeline) -> None:
    done = pipeline("compare", old / "local", old / "slurm")
    assert done.returncode == 0, done.stderr
    assert "bits_per_byte" in done.stdout or "bits per byte" in done.stdout


@pytest.mark.parametrize("name", ["local", "slurm"])
def test_a_dry_run_changes_nothing(old: Path, pipeline: Pipeline, slurm: dict[str, str], name: str) -> None:
    before = {path: path.read_bytes() for path in (old / name).rglob("*") if path.is_file()}
    where = ["--cluster", "local"] if name == "local" else []
    done = pipeline("submit", old / name, "--dry-run", *where, **slurm)
    assert done.returncode == 0, done.stderr
    assert {path: path.read_bytes() for path in (old / name).rglob("*") if path.is_file()} == before
    assert not (old.parent / "slurm" / "sbatch.log").exists()


def test_resume_submits_what_is_missing(old: Path, pipeline: Pipeline, slurm: dict[str, str]) -> None:
    run = Run(old / "slurm")
    done = pipeline("resume", run.root, "--yes", **slurm)
    assert done.returncode == 0, done.stderr
    jobs = fake_slurm.read(Path(slurm["FAKE_SLURM"]))
    stages = [next(Path(word).stem for word in job["words"] if word.endswith(".sbatch")) for job in jobs.values()]
    assert set(stages) == {"pretrain", "evaluate", "inference"}  # and no tokenize
    assert read_json(run.record)["id"] in next(iter(jobs.values()))["comment"]
    assert run.checkpoint_steps() == [0, 30, 35]
    assert not run.stop.exists()


def test_resume_of_a_local_run_makes_only_what_is_missing(old: Path, pipeline: Pipeline) -> None:
    run = Run(old / "local")
    assert pipeline("resume", run.root).returncode == 0
    run.samples(40).unlink()
    done = pipeline("resume", run.root)
    assert done.returncode == 0, done.stdout + done.stderr
    assert run.samples(40).is_file()
    assert run.report.is_file()
    assert run.checkpoint_steps() == [0, 40]
