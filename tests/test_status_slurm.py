"""What `status` says of a chain on Slurm: of a hundred Segments by few calls, in plain words, and never what is not so."""

from __future__ import annotations

import io
import json
import threading
import time
from pathlib import Path

import fake_slurm
import pytest
from test_submit_slurm import Pipeline, Site

from pipeline.files import append_line, write_json, write_text
from pipeline.run.folder import Run
from pipeline.status.logs import read_logs

SPRIO = "{id}|4021|2000|1500|521|0|0\n"
SSHARE = "lm||0.5\nlm|me|0.420000\n"
STEPS = [{"step": step, "tokens": step * 128, "loss": 3.0, "tokens_per_s": 1280.0, "time": step} for step in (5, 10)]


@pytest.fixture
def site(tmp_path: Path, micro: Path, pipeline: Pipeline) -> Site:
    return Site(tmp_path, micro, pipeline)


@pytest.fixture
def long(site: Site) -> Site:
    """A chain of a hundred Segments of which the first sixty are over, all but ten with a verdict, and one runs."""
    site.submit("pretrain.segments=100")
    names = site.by_name()
    for number in range(1, 61):
        job_id = names[f"pretrain-{number}"]["id"]
        end(site.run, job_id, 0, "stopped" if number <= 50 else None)
        site.set(f"pretrain-{number}", "COMPLETED", forgotten=True)
    site.set("pretrain-61", "RUNNING", nodes="n[1-4]")
    write_text(site.run.log("pretrain", names["pretrain-61"]["id"], 2), "")
    for row in STEPS:
        append_line(site.run.metrics, row)
    (site.folder / "calls").unlink()
    return site


def end(run: Run, job_id: str, attempt: int, verdict: str | None) -> None:
    """Leave what an attempt leaves: its log, and, unless it was killed, its verdict."""
    write_text(run.log("pretrain", job_id, attempt), "trains\n")
    if verdict:
        write_json(run.verdict(job_id, attempt), {"verdict": verdict, "reason": "time limit", "time": time.time()})


def calls(site: Site) -> list[str]:
    return [line.split()[0] for line in (site.folder / "calls").read_text().splitlines()]


def lines(site: Site) -> list[str]:
    return site.verb("status", site.run.root).stdout.splitlines()


def test_a_hundred_segments_are_asked_about_by_few_calls_without_accounting(long: Site) -> None:
    long.set("evaluate", "PENDING", reason="Priority")
    found = json.loads(long.verb("status", long.run.root, "--json").stdout)
    assert calls(long) == ["squeue", "sacct", "sprio"]
    states = [job["state"] for job in found["jobs"]]
    assert (states.count("stopped"), states.count("running")) == (60, 1)
    assert found["state"] == "running"


def test_a_hundred_segments_are_asked_about_by_few_calls_with_accounting(long: Site) -> None:
    evaluate = long.by_name()["evaluate"]["id"]
    long.set("evaluate", "PENDING", reason="Priority")
    (long.folder / "sprio.answer").write_text(SPRIO.format(id=evaluate))
    (long.folder / "sshare.answer").write_text(SSHARE)
    forgotten = [long.by_name()[f"pretrain-{number}"]["id"] for number in range(51, 61)]
    (long.folder / "sacct.answer").write_text(
        fake_slurm.sacct_list(*((job, "TIMEOUT", "0:15", "01:00:00", "n1") for job in forgotten))
    )
    shown = lines(long)
    assert calls(long) == ["squeue", "sacct", "sprio", "sshare"]
    asked = next(line for line in (long.folder / "calls").read_text().splitlines() if line.startswith("sacct"))
    assert f"-j {','.join(forgotten)} " in asked
    assert "priority evaluate  4,021: 2,000 for waiting, 1,500 for fair share, 521 for size" in shown
    assert any(line.startswith("share    0.42 in account lm") for line in shown)


def test_segments_that_are_alike_are_one_line(long: Site) -> None:
    shown = [" ".join(line.split()) for line in lines(long)]
    ids = {name: job["id"] for name, job in long.by_name().items()}
    assert f"pretrain 1-50 {ids['pretrain-1']}-{ids['pretrain-50']} stopped time limit" in shown
    assert f"pretrain 61 {ids['pretrain-61']} 2 running on n[1-4], 10:00 until its time limit" in shown
    assert any(line.startswith(f"pretrain 62-100 {ids['pretrain-62']}-{ids['pretrain-100']} pending") for line in shown)
    assert len([line for line in shown if line.startswith("pretrain") and "step" not in line]) == 4


def test_nothing_is_asked_of_the_queue_where_nothing_waits_for_its_turn(long: Site) -> None:
    for job_id, job in long.queue.items():
        if job["state"] == "PENDING":
            fake_slurm.set_state(long.folder, job_id, "PENDING", reason="Dependency")
    lines(long)
    assert calls(long) == ["squeue", "sacct"]


def test_bad_nodes_are_named_with_reason_and_expiry(site: Site) -> None:
    site.submit()
    for name, until in (("n7", time.time() + 3600), ("n8", time.time() - 1)):
        state = site.run.root.parent / ".ours"
        state.mkdir(exist_ok=True)
        append_line(state / "bad_nodes.jsonl", {"node": name, "reason": "ECC errors", "until": until, "run": "x"})
    bad = [line for line in lines(site) if line.startswith("bad node")]
    assert len(bad) == 1
    assert bad[0].startswith("bad node n7 until ")
    assert bad[0].endswith(": ECC errors")
    (node,) = json.loads(site.verb("status", site.run.root, "--json").stdout)["bad_nodes"]
    assert (node["name"], node["reason"]) == ("n7", "ECC errors")


def test_segments_left_over_are_no_failure(site: Site) -> None:
    site.submit("pretrain.segments=3")
    names = site.by_name()
    end(site.run, names["pretrain-1"]["id"], 0, "complete")
    site.set("pretrain-1", "COMPLETED")
    for name in ("pretrain-2", "pretrain-3"):
        site.set(name, "CANCELLED")
    assert sum("not needed: training was complete before it" in line for line in lines(site)) == 2


def test_time_left_of_one_that_waits_is_that_of_training(site: Site) -> None:
    site.submit()
    for row in STEPS:
        append_line(site.run.metrics, row)
    assert any("left of training, once it runs" in line for line in lines(site))


def test_a_controller_that_does_not_answer_is_said_and_nothing_is_made_up(site: Site) -> None:
    site.submit()
    end(site.run, site.by_name()["pretrain"]["id"], 0, "stopped")
    for name in ("squeue", "scontrol", "sacct"):
        command = site.folder / "bin" / name
        command.write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2; exit 1\n")
    found = json.loads(site.verb("status", site.run.root, "--json").stdout)
    reasons = [job["reason"] for job in found["jobs"]]
    assert {job["state"] for job in found["jobs"]} == {"pending"}
    assert "not known: squeue does not answer: Unable to contact slurm controller" in reasons
    assert any(reason.endswith("its last attempt ended with stopped") for reason in reasons)
    assert "does not answer" in found["source"]


def test_logs_are_followed_across_segments_and_attempts(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.submit("pretrain.segments=2")
    ids = {name: job["id"] for name, job in site.by_name().items()}
    for name, value in site.changes.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("pipeline.status.logs.SLURM_STATE_SECONDS", 0.2)
    out = io.StringIO()
    reader = threading.Thread(target=read_logs, args=(site.run, True, None, None, out), daemon=True)
    reader.start()
    for name, attempt in (("pretrain-1", 0), ("pretrain-1", 1), ("pretrain-2", 0)):
        site.set(name, "RUNNING")
        write_text(site.run.log("pretrain", ids[name], attempt), f"{name}, attempt {attempt}\n")
        if attempt == 0 and name == "pretrain-1":
            site.set(name, "PENDING", reason="BeginTime")  # requeued: not the end
    write_text(site.run.logs / f"pretrain-{ids['pretrain-2']}.slurm.log", "slurmstepd: error: *** CANCELLED ***\n")
    for name in ids:
        site.set(name, "CANCELLED")
    reader.join(60)
    assert not reader.is_alive()
    said = [line for line in out.getvalue().splitlines() if line and not line.startswith("==>")]
    assert sorted(said) == [
        "pretrain-1, attempt 0", "pretrain-1, attempt 1", "pretrain-2, attempt 0", "slurmstepd: error: *** CANCELLED ***",
    ]  # fmt: skip
