"""What `status` says of a chain on Slurm: of a hundred Segments by few calls, in plain words, and never what is not so."""

from __future__ import annotations

import io
import json
import threading
import time
from pathlib import Path

import fake_slurm
import pytest
from slurm_site import NO_SUBMIT, Pipeline, Site

from pipeline.files import append_line, write_json, write_text
from pipeline.run.folder import Run
from pipeline.run.records import BeginRecord
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
    site.cluster.write_text(NO_SUBMIT)
    site.submit("pretrain.segments=100")
    site.tokenized()
    ids = site.ids("pretrain")
    jobs = site.queue
    for number, job_id in enumerate(ids[:60], 1):
        end(site.run, job_id, 0, "stopped" if number <= 50 else None)
        jobs[job_id] |= {"state": "COMPLETED", "forgotten": True}
    jobs[ids[60]] |= {"state": "RUNNING", "nodes": "n[1-4]"}
    fake_slurm.write(site.folder, jobs)
    write_text(site.run.log("pretrain", ids[60], 2), "")
    for row in STEPS:
        append_line(site.run.metrics, row)
    (site.folder / "calls").unlink()
    return site


def end(run: Run, job_id: str, attempt: int, verdict: str | None) -> None:
    """Leave what an attempt leaves: its log, and, unless it was killed, its verdict."""
    write_text(run.log("pretrain", job_id, attempt), "trains\n")
    BeginRecord(stage="pretrain", time=time.time() - 60).write(run.beginning(job_id, attempt), durable=False)
    if verdict:
        write_json(run.verdict(job_id, attempt), {"verdict": verdict, "reason": "time limit", "time": time.time()})


def calls(site: Site) -> list[str]:
    return [line.split()[0] for line in (site.folder / "calls").read_text().splitlines()]


def lines(site: Site) -> list[str]:
    return site.verb("status", site.run.root).stdout.splitlines()


def test_a_hundred_segments_are_asked_about_by_few_calls_without_accounting(long: Site) -> None:
    long.set("evaluate", "PENDING", reason="Priority")
    found = json.loads(long.verb("status", long.run.root, "--json").stdout)
    assert calls(long) == ["squeue", "sacct", "sprio"]  # sacct for those that left no verdict
    states = [job["state"] for job in found["jobs"]]
    assert (states.count("stopped"), states.count("running")) == (60, 1)
    assert found["state"] == "running"


def test_a_job_whose_records_are_lost_is_shown_all_the_same(site: Site) -> None:
    site.submit()
    job = site.ids("tokenize")[0]
    write_text(site.run.log("tokenize", job, 0), "all that is left of it\n")
    site.set("tokenize", "COMPLETED", forgotten=True)
    found = json.loads(site.verb("status", site.run.root, "--json").stdout)
    (shown,) = [told for told in found["jobs"] if told["stage"] == "tokenize"]
    assert (shown["job_id"], shown["log"]) == (job, f"logs/tokenize-{job}.0.log")


def test_a_hundred_segments_are_asked_about_by_few_calls_with_accounting(long: Site) -> None:
    evaluate = long.by_name()["evaluate"]["id"]
    long.set("evaluate", "PENDING", reason="Priority")
    (long.folder / "sprio.answer").write_text(SPRIO.format(id=evaluate))
    (long.folder / "sshare.answer").write_text(SSHARE)
    forgotten = long.ids("pretrain")[50:60]
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
    ids = ["", *long.ids("pretrain")]
    assert f"pretrain 1-50 {ids[1]}-{ids[50]} stopped time limit" in shown
    assert f"pretrain 61 {ids[61]} 2 running on n[1-4], 10:00 until its time limit" in shown
    assert any(line.startswith(f"pretrain 62-100 {ids[62]}-{ids[100]} pending") for line in shown)
    assert len([line for line in shown if line.startswith("pretrain") and "step" not in line]) == 4
    assert not any(line.startswith("missing") for line in shown)


def test_a_rolling_pair_is_asked_about_by_one_call_however_many_segments_were_before(site: Site) -> None:
    """What is known to have ended is not asked about again; the Segments are numbered as they came."""
    site.submit()
    site.tokenized()
    for number in range(5):
        (*_, now) = site.ids("pretrain")
        site.set_id(now, "RUNNING", nodes="n1")
        site.submit()  # as the attempt itself does
        end(site.run, now, 0, "stopped")
        site.set_id(now, "COMPLETED", forgotten=number < 3)
    site.set("pretrain", "RUNNING", nodes="n1")
    site.submit()
    *_, successor = site.ids("pretrain")
    for job_id, job in site.queue.items():
        if job["state"] == "PENDING":
            fake_slurm.set_state(site.folder, job_id, "PENDING", reason="Dependency")
    (site.folder / "calls").unlink()
    found = json.loads(site.verb("status", site.run.root, "--json").stdout)
    assert calls(site) == ["squeue"]
    segments = [job for job in found["jobs"] if job["stage"] == "pretrain"]
    assert [job["segment"] for job in segments] == [1, 2, 3, 4, 5, 6, 7]
    assert [job["state"] for job in segments] == ["stopped"] * 5 + ["running", "pending"]
    assert (segments[-1]["job_id"], found["not_submitted"]) == (successor, [])


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
    site.cluster.write_text(NO_SUBMIT)
    site.submit("pretrain.segments=3")
    one, two, three = site.ids("pretrain")
    end(site.run, one, 0, "complete")
    site.set_id(one, "COMPLETED")
    for job_id in (two, three):
        site.set_id(job_id, "CANCELLED")
    found = json.loads(site.verb("status", site.run.root, "--json").stdout)
    assert [job["state"] for job in found["jobs"] if job["stage"] == "pretrain"] == ["completed"]
    assert "failed" not in {job["state"] for job in found["jobs"]}


def test_jobs_that_are_missing_are_named(site: Site) -> None:
    """MaxSubmitJobs, or a person, has kept them out; the chain would end before it is done."""
    site.submit()
    site.tokenized()
    site.set("pretrain", "RUNNING", nodes="n1")
    site.set("evaluate", "CANCELLED")
    (working,) = site.ids("pretrain")
    found = json.loads(site.verb("status", site.run.root, "--json").stdout)
    assert found["not_submitted"] == [f"pretrain after job {working}", "evaluate"]
    (line,) = [line for line in lines(site) if line.startswith("missing")]
    assert f"2 Jobs of the chain are not submitted: pretrain after job {working}, evaluate." in line
    assert "-m pipeline resume " in line
    site.verb("stop", site.run.root)
    assert not any(line.startswith("missing") for line in lines(site))


def test_what_accounting_has_of_another_job_under_the_same_id_is_not_believed(site: Site) -> None:
    site.submit()
    tokenize = site.by_name()["tokenize"]["id"]
    site.set("tokenize", "COMPLETED", forgotten=True)
    told = fake_slurm.sacct_list((tokenize, "NODE_FAIL", "0:0", "01:00:00", "n1"))
    (site.folder / "sacct.answer").write_text(told.replace("\x1f\x1f", "\x1fa-stranger's\x1f"))
    assert "lost a node" not in site.verb("status", site.run.root).stdout
    (site.folder / "sacct.answer").write_text(told)
    assert "lost a node" in site.verb("status", site.run.root).stdout


def test_what_slurm_does_not_tell_is_not_missing(site: Site) -> None:
    site.submit()
    site.set("evaluate", "CANCELLED")
    (site.folder / "squeue.answer").write_text("<html>Bad gateway</html>")
    found = json.loads(site.verb("status", site.run.root, "--json").stdout)
    assert (found["state"], found["not_submitted"]) == ("pending", [])


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
    site.submit()
    for name, value in site.changes.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("pipeline.status.logs.SLURM_STATE_SECONDS", 0.2)
    out = io.StringIO()
    reader = threading.Thread(target=read_logs, args=(site.run, True, None, None, out), daemon=True)
    reader.start()
    (first,) = site.ids("pretrain")
    site.set_id(first, "RUNNING")
    site.submit()
    _, second = site.ids("pretrain")
    for job_id, attempt in ((first, 0), (first, 1), (second, 0)):
        site.set_id(job_id, "RUNNING")
        write_text(site.run.log("pretrain", job_id, attempt), f"job {job_id}, attempt {attempt}\n")
        if attempt == 0 and job_id == first:
            site.set_id(job_id, "PENDING", reason="BeginTime")  # requeued: not the end
        else:
            site.set_id(job_id, "COMPLETED")
    write_text(site.run.logs / f"pretrain-{second}.slurm.log", "slurmstepd: error: *** CANCELLED ***\n")
    for job_id in site.queue:
        site.set_id(job_id, "CANCELLED")
    reader.join(60)
    assert not reader.is_alive()
    said = [line for line in out.getvalue().splitlines() if line and not line.startswith("==>")]
    assert sorted(said) == [
        f"job {first}, attempt 0", f"job {first}, attempt 1", f"job {second}, attempt 0",
        "slurmstepd: error: *** CANCELLED ***",
    ]  # fmt: skip


def test_a_report_on_a_node_that_may_not_ask_calls_nothing(site: Site) -> None:
    site.cluster.write_text(site.cluster.read_text() + "nodes_may_submit: false\n")
    assert site.submit().returncode == 0
    (site.folder / "calls").unlink()
    told = site.pipeline("status", site.run.root, "--json", **(site.changes | {"SLURM_JOB_ID": "7"}))
    assert told.returncode in (0, 1), told.stderr
    assert not (site.folder / "calls").exists()
