"""Attempts as files: what the host writes down, and how one that left nothing is counted."""

from __future__ import annotations

import time
from pathlib import Path

from pipeline.run.attempts import Beginning, newest_step, read_attempts, settle, settle_lost
from pipeline.run.folder import Run
from pipeline.run.verdict import WARNED_EARLY, write_verdict
from pipeline.slurm.bad_nodes import BadNodes


def begin(run: Run, job_id: str, number: int, before: int, when: float, *nodes: str) -> Beginning:
    beginning = Beginning(job_id, number, "pretrain", list(nodes), before, when)
    beginning.write(run)
    return beginning


def test_an_attempt_is_its_beginning_and_its_verdict(tmp_path: Path) -> None:
    run = Run(tmp_path)
    first = begin(run, "7", 0, -1, 100.0, "n1", "n2")
    settle(run, first, {"verdict": "stopped", "reason": "USR2", "step": 50, "time": 160.0}, WARNED_EARLY)
    (attempt,) = read_attempts(run, "pretrain")
    assert (attempt.verdict, attempt.nodes, attempt.seconds, attempt.preempted) == ("stopped", 2, 60.0, True)
    assert (attempt.before, attempt.after) == (-1, newest_step(run))
    assert read_attempts(run, "evaluate") == []


def test_the_attempt_that_runs_now_is_not_counted(tmp_path: Path) -> None:
    run = Run(tmp_path)
    begin(run, "7", 0, -1, time.time(), "n1")
    assert read_attempts(run, "pretrain") == []


def test_one_that_left_no_verdict_is_lost_and_named_with_its_nodes(tmp_path: Path) -> None:
    run = Run(tmp_path)
    begin(run, "7", 0, -1, 100.0, "n1", "n2")
    lost = settle_lost(run, "pretrain", "7", 1)
    assert [b.number for b in lost] == [0]
    begin(run, "7", 1, -1, 200.0, "n3")
    (attempt,) = read_attempts(run, "pretrain")
    assert attempt.verdict == "lost"
    assert "n1, n2" in attempt.reason
    assert settle_lost(run, "pretrain", "7", 1) == []


def test_order_is_by_time_not_by_job_id(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for number, (job, when) in enumerate([("99", 10.0), ("100", 20.0), ("100", 30.0)]):
        begin(run, job, number, -1, when)
        write_verdict(run, job, number, "pretrain", "crash", f"the {number}", None)
    assert [a.reason for a in read_attempts(run, "pretrain")] == ["the 0", "the 1", "the 2"]


def test_bad_nodes_expire_and_the_newest_reason_counts(tmp_path: Path) -> None:
    nodes = BadNodes(tmp_path / "state" / "bad_nodes.jsonl")
    assert nodes.read() == {}
    nodes.add(["n1", "n2"], "ECC", 1.0, "/runs/a")
    nodes.add(["n2"], "no GPU", 24.0, "/runs/b")
    assert {name: node.reason for name, node in nodes.read().items()} == {"n1": "ECC", "n2": "no GPU"}
    assert list(nodes.read(now=time.time() + 2 * 3600)) == ["n2"]


def test_blame_is_taken_back_from_the_run_that_gave_it_only(tmp_path: Path) -> None:
    nodes = BadNodes(tmp_path / "bad_nodes.jsonl")
    nodes.add(["n1", "n2"], "no GPU", 24.0, "/runs/a")
    nodes.add(["n2"], "ECC", 24.0, "/runs/b")
    nodes.withdraw(["n1", "n2"], "/runs/a")
    assert {name: node.reason for name, node in nodes.read().items()} == {"n2": "ECC"}
    nodes.add(["n1"], "disk", 24.0, "/runs/a")
    assert {name: node.reason for name, node in nodes.read().items()} == {"n2": "ECC", "n1": "disk"}
