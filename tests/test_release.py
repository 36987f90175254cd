"""The released checkpoint: a pointer, kept from retention, with a record of who moved it and why."""

from __future__ import annotations

from pathlib import Path

import pytest
from example_run import make_run
from slurm_site import Pipeline

from pipeline.errors import NotReadyError, UserError
from pipeline.evaluation.release import promote, released, rollback
from pipeline.files import read_json, read_lines, write_json
from pipeline.run.folder import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = make_run(tmp_path / "example")
    for step in (100, 200, 900):
        write_json(run.checkpoint(step) / "manifest.json", {"step": step, "sha256": f"of {step}"})
    return run


def test_promote_and_rollback_move_the_pointer_and_tell_why(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "ada")
    for step in (100, 200, 900):
        promote(run, step, f"step {step} is better")
    assert released(run) == 900
    assert read_json(run.released)["scores"] == {"bits_per_byte": 1.393}
    rollback(run, "worse on our questions")
    assert released(run) == 200
    rollback(run, "that too")
    assert released(run) == 100
    with pytest.raises(NotReadyError, match="nothing was released before"):
        rollback(run, "once more")
    records = read_lines(run.releases)
    assert [(r["action"], r["step"], r["by"]) for r in records] == [
        ("promote", 100, "ada"), ("promote", 200, "ada"), ("promote", 900, "ada"),
        ("rollback", 200, "ada"), ("rollback", 100, "ada"),
    ]  # fmt: skip
    assert records[3]["why"] == "worse on our questions"
    assert [event["event"] for event in read_lines(run.events)][-2:] == ["rollback", "rollback"]


def test_a_released_checkpoint_is_pinned(run: Run) -> None:
    promote(run, 200, "")
    assert (run.checkpoint(200) / "pinned").exists()


def test_only_what_is_there_and_unchanged_is_released(run: Run) -> None:
    with pytest.raises(UserError, match="no checkpoint of step 300; there are: 0, 100, 200, 900"):
        promote(run, 300, "")
    promote(run, 100, "")
    promote(run, 900, "")
    write_json(run.checkpoint(100) / "manifest.json", {"step": 100, "sha256": "trained again"})
    with pytest.raises(NotReadyError, match="holds other weights"):
        rollback(run, "")
    assert released(run) == 900


def test_the_verbs(run: Run, pipeline: Pipeline) -> None:
    done = pipeline("promote", run.root, "900", "--reason", "best so far")
    assert done.returncode == 0, done.stderr
    assert "step 900 is released" in done.stdout
    assert "released" in pipeline("status", run.root).stdout
    assert pipeline("rollback", run.root).returncode == 3
