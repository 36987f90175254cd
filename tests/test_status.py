"""Status tells the truth, also when files are torn and processes gone."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from example_run import MAX_STEPS, SPEED, STEP_SECONDS, job, make_run, metric, write_jobs

from pipeline.files import append_line, write_json, write_text
from pipeline.run.folder import Run
from pipeline.run.owner import this_process
from pipeline.screen import Screen
from pipeline.status.read import read_status
from pipeline.status.view import print_status


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path / "example")


def shown(run: Run) -> str:
    out = io.StringIO()
    print_status(read_status(run), Screen(file=out, width=120), source=True)
    return out.getvalue()


def test_a_finished_run_is_completed(run: Run) -> None:
    status = read_status(run).to_json()
    assert (status["state"], status["step"], status["max_steps"]) == ("completed", MAX_STEPS, MAX_STEPS)
    assert [job["stage"] for job in status["jobs"]] == ["tokenize", "pretrain", "evaluate", "inference"]
    assert {"run", "state", "jobs", "step", "max_steps", "loss", "tokens_per_s", "eta_s", "goodput"} <= set(status)
    json.dumps(status)


@pytest.mark.parametrize(
    "missing", [f"checkpoints/step-{MAX_STEPS:08d}/manifest.json", f"samples/step-{MAX_STEPS:08d}.jsonl"]
)
def test_never_completed_without_its_outputs(run: Run, missing: str) -> None:
    (run.root / missing).unlink()
    assert read_status(run).state != "completed"


def test_a_job_whose_process_is_gone_is_stopped_and_the_way_on_is_named(run: Run) -> None:
    run.samples(MAX_STEPS).unlink()
    gone = {"process": this_process() | {"started": "1"}}
    write_jobs(run, [job("pretrain", "2", 0) | {"state": "running", "ended": None} | gone])
    write_json(run.jobs, json.loads(run.jobs.read_text()) | this_process() | {"started": "1"})
    status = read_status(run)
    assert status.state == "stopped"
    assert status.jobs[0].state == "stopped"
    assert "resume" in shown(run)


def test_a_failure_is_shown_with_its_reason_and_log(run: Run) -> None:
    run.samples(MAX_STEPS).unlink()
    write_jobs(run, [job("pretrain", "2", 0) | {"state": "failed", "reason": "diverged at step 7"}])
    text = shown(run)
    assert read_status(run).state == "failed"
    assert "diverged at step 7" in text
    assert "logs/pretrain-2.0.log" in text


@pytest.mark.parametrize("torn", ["jobs.json", "metrics.jsonl", "events.jsonl", "data/index.json", "run.json"])
@pytest.mark.parametrize("text", ["", "{", "[1, 2", "null", '"x"', "\0\0\0"])
def test_torn_files_are_no_crash(run: Run, torn: str, text: str) -> None:
    write_text(run.root / torn, text)
    shown(run)


def test_a_new_run_is_planned(tmp_path: Path) -> None:
    run = Run(tmp_path / "new")
    write_text(run.config, "name: new\n")
    assert read_status(run).state == "planned"
    assert "resume" in shown(run)


def test_a_running_job_has_a_time_left(run: Run) -> None:
    (run.checkpoint(MAX_STEPS) / "manifest.json").unlink()
    run.metrics.unlink()
    append_line(run.metrics, metric(600, tokens_per_s=SPEED))
    write_jobs(run, [job("pretrain", "2", state="running", ended=None, process=this_process())])
    status = read_status(run)
    assert status.state == "running"
    assert status.eta_s == pytest.approx(300 * STEP_SECONDS)
    assert "logs -f" in shown(run)


def test_steps_that_are_made_again_count_once(run: Run) -> None:
    goodput = read_status(run).goodput
    assert goodput is not None
    for step in range(810, MAX_STEPS, 10):
        append_line(run.metrics, metric(step, loss=1.0))
    status = read_status(run)
    assert (status.step, status.loss) == (MAX_STEPS - 10, 1.0)
    assert status.goodput is not None
    assert 0 < status.goodput < goodput


def test_a_person_s_job_script_is_a_running_run(run: Run) -> None:
    run.jobs.unlink()
    write_json(run.control / "owner.json", this_process())
    assert read_status(run).state == "running"
