"""Logs are printed whole, in order, and followed across attempts."""

from __future__ import annotations

import io
import os
import threading
from pathlib import Path

import pytest
from example_run import job, make_run, write_jobs

from pipeline.errors import NotReadyError, UserError
from pipeline.files import write_text
from pipeline.run.folder import Run
from pipeline.run.owner import this_process
from pipeline.status.logs import log_files, read_logs


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path / "example")


def printed(run: Run, stage: str | None = None, lines: int | None = None, follow: bool = False) -> str:
    out = io.StringIO()
    read_logs(run, follow, stage, lines, out)
    return out.getvalue()


def test_all_logs_in_the_order_of_the_chain(run: Run) -> None:
    text = printed(run)
    places = [text.index(f"{stage} begins") for stage in ("tokenize", "pretrain", "evaluate", "inference")]
    assert places == sorted(places)


def test_attempts_are_ordered_as_numbers(run: Run) -> None:
    for attempt in (10, 2):
        write_text(run.log("pretrain", "2", attempt), f"attempt {attempt}\n")
    assert [path.name for path in log_files(run, "pretrain")] == [f"pretrain-2.{n}.log" for n in (0, 2, 10)]


def test_one_stage_and_its_last_lines(run: Run) -> None:
    assert "pretrain begins" not in printed(run, "pretrain", lines=1)
    assert "pretrain ends" in printed(run, "pretrain", lines=1)
    assert "tokenize" not in printed(run, "pretrain")


def test_following_a_run_that_has_ended_ends(run: Run) -> None:
    assert "inference ends" in printed(run, follow=True)


def test_what_is_not_there_is_said(run: Run, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no stage 'train'"):
        printed(run, "train")
    empty = Run(tmp_path / "empty")
    empty.root.mkdir()
    with pytest.raises(NotReadyError, match="no log yet"):
        printed(empty)


def test_following_shows_an_attempt_that_starts_meanwhile(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.status.logs.POLL_SECONDS", 0.01)
    monkeypatch.setattr("pipeline.status.logs.STATE_SECONDS", 0.05)
    write_jobs(run, [job("pretrain", "2", state="running", ended=None, process=this_process())])
    out = io.StringIO()
    follower = threading.Thread(target=read_logs, args=(run, True, "pretrain", None, out))
    follower.start()
    write_text(run.log("pretrain", "2", 1), "again\nno line end")
    write_jobs(run, [job("pretrain", "2", attempt=1)])
    follower.join(timeout=30)
    assert out.getvalue().endswith("==> pretrain-2.1.log <==\nagain\nno line end\n")


def test_a_closed_pipe_is_quiet(run: Run) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as out:
        read_logs(run, False, None, None, out)


def test_what_slurm_has_to_say_comes_first_for_its_job_and_nothing_is_shown_of_an_empty_file(run: Run) -> None:
    write_text(run.logs / "pretrain-2.slurm.log", "slurmstepd: error: cannot open the script's folder\n")
    write_text(run.logs / "pretrain-1.slurm.log", "")
    write_text(run.log("pretrain", "3", 0), "the next Segment\n")
    assert [path.name for path in log_files(run, "pretrain")] == [
        "pretrain-1.slurm.log", "pretrain-2.slurm.log", "pretrain-2.0.log", "pretrain-3.0.log",
    ]  # fmt: skip
    text = printed(run, "pretrain")
    assert text.startswith("==> pretrain-2.slurm.log <==\nslurmstepd: error")
    assert "pretrain-1" not in text
