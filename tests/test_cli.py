"""The command line: exit codes, messages without tracebacks, and what the environment must not change."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import environment

Pipeline = Callable[..., "subprocess.CompletedProcess[str]"]

MISTAKES = {
    "unknown verb": (["trian"], "No such command"),
    "unknown option": (["plan", "--clutser", "x"], "No such option"),
    "missing file": (["plan", "absent.yaml"], "absent.yaml"),
    "folder as config": (["plan", "."], "no Run here"),
    "not a Run": (["status", "nowhere"], "no Run here"),
    "unknown stage": (["submit", "--only", "train"], "the stages are preflight, tokenize, pretrain"),
    "unknown cluster": (["plan", "--cluster", "ours.yaml"], "--cluster local"),
    "word after the config": (["plan", "micro.yaml", "fast"], "key.path=value"),
    "misspelt key": (["plan", "micro.yaml", "pretrain.max_step=3"], "did you mean max_steps?"),
    "impossible batch": (["plan", "micro.yaml", "pretrain.nproc_per_node=3"], "global_batch_size"),
    "prompt too long": (["plan", "micro.yaml", "inference.max_new_tokens=0"], "max_new_tokens"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_message_and_exit_2(pipeline: Pipeline, micro: Path, mistake: str) -> None:
    words, message = MISTAKES[mistake]
    result = pipeline(*words)
    assert result.returncode == 2, result.stderr
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not (micro.parent / "runs").exists()


def test_the_default_config_needs_no_words(pipeline: Pipeline) -> None:
    result = pipeline("plan", "--cluster", "local", "--json")
    assert json.loads(result.stdout)["run"].endswith("/runs/tiny")


def test_plan_is_the_same_inside_a_job_and_outside(pipeline: Pipeline, micro: Path) -> None:
    foreign = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "64", "RANK": "3", "WORLD_SIZE": "64", "MASTER_ADDR": "n1"}
    words = ("plan", micro, "--cluster", "local", "--json")
    assert pipeline(*words, **foreign).stdout == pipeline(*words).stdout


def test_odd_environments_do_no_harm(pipeline: Pipeline, micro: Path) -> None:
    result = pipeline("plan", micro, "--cluster", "local", LANG="C", LC_ALL="C", HOME="", CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 0, result.stderr


def test_a_closed_pipe_is_quiet(micro: Path) -> None:
    line = f"{sys.executable} -m pipeline schema | head -n 1"
    result = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line], capture_output=True, text=True, env=environment(), check=False
    )
    assert (result.returncode, result.stderr) == (0, "")


def fake_slurm(folder: Path, answer: str) -> str:
    """Put a scontrol on PATH that gives `answer`; return the PATH."""
    folder.mkdir()
    command = folder / "scontrol"
    command.write_text(f"#!/bin/sh\n{answer}\n")
    command.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def test_where_a_slurm_answers_nothing_starts_by_itself(pipeline: Pipeline, micro: Path, tmp_path: Path) -> None:
    path = fake_slurm(tmp_path / "bin", "echo 'Slurmctld(primary) at head is UP'")
    result = pipeline("submit", micro, PATH=path)
    assert result.returncode == 2
    assert "--cluster local" in result.stderr
    assert not (tmp_path / "runs").exists()
    assert pipeline("plan", micro, "--cluster", "local", PATH=path).returncode == 0


@pytest.mark.parametrize("answer", ["echo 'Slurmctld(primary) at head is DOWN'; exit 1", "sleep 30"])
def test_a_slurm_that_does_not_answer_is_none(pipeline: Pipeline, micro: Path, tmp_path: Path, answer: str) -> None:
    assert pipeline("plan", micro, PATH=fake_slurm(tmp_path / "bin", answer)).returncode == 0


def test_version_and_help(pipeline: Pipeline) -> None:
    assert pipeline("--version").stdout.strip() == "0.2.0"
    assert "submit" in pipeline("--help").stdout


@pytest.mark.parametrize(("words", "passed"), [(["0"], "0"), (["12"], "12"), ([], "")])
def test_step_0_is_a_step_elsewhere_too(words: list[str], passed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline.cli import verbs

    told: list[tuple[str, ...]] = []
    monkeypatch.setattr(verbs, "pass_on", lambda run, *words: told.append(words) or 0)
    monkeypatch.setattr(sys, "argv", ["pipeline", "export", "somewhere", *words])
    with pytest.raises(SystemExit) as end:
        verbs.main()
    assert end.value.code == 0
    assert told == [("export", passed, "--precision=fp32")]
