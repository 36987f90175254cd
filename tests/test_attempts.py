"""Attempts as files: what the host writes down, and how one that left nothing is counted."""

from __future__ import annotations

import time
from pathlib import Path

from pipeline.files import read_json, write_json, write_text
from pipeline.run.attempts import all_attempts, newest_step, past_attempts, settle, settle_lost
from pipeline.run.folder import Run
from pipeline.run.records import BeginRecord, JobRecord, SaidRecord, VerdictRecord
from pipeline.run.verdict import WARNED_EARLY, verdict_of, write_said
from pipeline.slurm.bad_nodes import BadNodes


def begin(run: Run, job_id: str, number: int, before: int, when: float, *nodes: str) -> BeginRecord:
    record = BeginRecord(
        job_id=job_id, number=number, stage="pretrain", nodes=list(nodes), step_at_start=before, time=when
    )
    record.write(run.beginning(job_id, number))
    return record


def test_an_attempt_is_its_beginning_and_its_verdict(tmp_path: Path) -> None:
    run = Run(tmp_path)
    first = begin(run, "7", 0, -1, 100.0, "n1", "n2")
    settle(run, first, SaidRecord(verdict="stopped", reason="USR2", step=50, time=160.0), WARNED_EARLY)
    (attempt,) = past_attempts(run, "pretrain")
    assert (attempt.verdict, attempt.nodes, attempt.seconds, attempt.preempted) == ("stopped", 2, 60.0, True)
    assert (attempt.before, attempt.after) == (-1, newest_step(run))
    assert past_attempts(run, "evaluate") == []


def test_what_a_rank_said_and_what_the_host_made_of_it_are_two_records(tmp_path: Path) -> None:
    run = Run(tmp_path)
    first = begin(run, "7", 0, -1, 100.0, "n1")
    write_said(run, "7", 0, "pretrain", "crash", "ValueError", 5)
    said = run.said("7", 0).read_bytes()
    assert verdict_of(run, "7", 0) is None
    settle(run, first, SaidRecord(verdict="out_of_memory", reason="oom_kill"), None)
    assert run.said("7", 0).read_bytes() == said
    assert read_json(run.verdict("7", 0))["verdict"] == "out_of_memory"


def test_the_attempt_that_runs_now_is_not_counted(tmp_path: Path) -> None:
    run = Run(tmp_path)
    begin(run, "7", 0, -1, time.time(), "n1")
    assert past_attempts(run, "pretrain") == []


def test_one_that_left_no_verdict_is_lost_and_named_with_its_nodes(tmp_path: Path) -> None:
    run = Run(tmp_path)
    begin(run, "7", 0, -1, 100.0, "n1", "n2")
    lost = settle_lost(run, "pretrain", "7", 1)
    assert [b.number for b in lost] == [0]
    begin(run, "7", 1, -1, 200.0, "n3")
    (attempt,) = past_attempts(run, "pretrain")
    assert attempt.verdict == "lost"
    assert "n1, n2" in attempt.reason
    assert settle_lost(run, "pretrain", "7", 1) == []


def test_one_that_left_no_verdict_and_a_word_of_a_rank_ended_as_that_says(tmp_path: Path) -> None:
    run = Run(tmp_path)
    begin(run, "7", 0, -1, 100.0, "n1")
    write_said(run, "7", 0, "pretrain", "diverged", "loss is NaN", 40)
    run.warned("7", 0).parent.mkdir()
    run.warned("7", 0).touch()
    settle_lost(run, "pretrain", "8", 0)
    (attempt,) = past_attempts(run, "pretrain")
    assert (attempt.verdict, attempt.reason) == ("diverged", "loss is NaN")
    assert not run.warned("7", 0).exists()


def test_order_is_by_time_not_by_job_id(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for number, (job, when) in enumerate([("99", 10.0), ("100", 20.0), ("100", 30.0)]):
        record = begin(run, job, number, -1, when)
        settle(run, record, SaidRecord(verdict="crash", reason=f"the {number}"), None)
    assert [a.reason for a in past_attempts(run, "pretrain")] == ["the 0", "the 1", "the 2"]


def test_a_torn_record_reads_as_none_and_keys_of_another_version_are_left_out(tmp_path: Path) -> None:
    run = Run(tmp_path)
    begin(run, "7", 0, 10, 100.0, "n1")
    write_text(run.verdict("7", 0), '{"verdict": "cra')
    (one,) = all_attempts(run)
    assert (one.stage, one.verdict) == ("pretrain", None)
    write_json(run.beginning("7", 0), {"stage": "pretrain", "time": 5.0, "of_tomorrow": [1]})
    (one,) = all_attempts(run)
    assert (one.begin is not None, one.began, one.name) == (True, 5.0, "7.0")
    for text in ("", "[]", "null", '{"verdict": []}'):
        write_text(run.verdict("7", 0), text)
        assert VerdictRecord.read(run.verdict("7", 0)) is None
    write_text(run.beginning("7", 0), "")
    assert all_attempts(run) == []
    assert JobRecord.read(run.job_record(1)) is None


def test_the_flat_files_of_version_0_1_0_are_read(tmp_path: Path) -> None:
    run = Run(tmp_path)
    write_json(
        run.attempts / "7.0.begin",
        {"job_id": "7", "number": 0, "stage": "pretrain", "nodes": ["n1"], "before": -1, "time": 100.0},
    )
    write_json(
        run.attempts / "7.0.json",
        {"verdict": "stopped", "reason": "USR2", "stage": "pretrain", "before": -1, "after": 50, "time": 160.0},
    )
    begin(run, "8", 0, 50, 200.0, "n2")
    assert [one.name for one in all_attempts(run, "pretrain")] == ["7.0", "8.0"]
    (attempt,) = past_attempts(run, "pretrain")
    assert (attempt.verdict, attempt.before, attempt.after, attempt.seconds) == ("stopped", -1, 50, 60.0)


def test_bad_nodes_expire_and_the_newest_reason_counts(tmp_path: Path) -> None:
    nodes = BadNodes(tmp_path / "state")
    assert nodes.read() == {}
    nodes.add(["n1", "n2"], "ECC", 1.0, "/runs/a")
    nodes.add(["n2"], "no GPU", 24.0, "/runs/b")
    assert {name: node.reason for name, node in nodes.read().items()} == {"n1": "ECC", "n2": "no GPU"}
    assert list(nodes.read(now=time.time() + 2 * 3600)) == ["n2"]


def test_blame_is_taken_back_from_the_run_that_gave_it_only(tmp_path: Path) -> None:
    nodes = BadNodes(tmp_path)
    nodes.add(["n1", "n2"], "no GPU", 24.0, "/runs/a")
    nodes.add(["n2"], "ECC", 24.0, "/runs/b")
    nodes.withdraw(["n1", "n2"], "/runs/a")
    assert {name: node.reason for name, node in nodes.read().items()} == {"n2": "ECC"}
    nodes.add(["n1"], "disk", 24.0, "/runs/a")
    assert {name: node.reason for name, node in nodes.read().items()} == {"n2": "ECC", "n1": "disk"}
