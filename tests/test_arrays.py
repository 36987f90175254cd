"""tokenize as a Job array: three Jobs, tasks that Slurm allows, one line of status, and tasks that do not disturb others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_slurm import squeue_list
from slurm_site import Pipeline, Script, Site
from test_plan import SITE

from pipeline.config.schema import Config
from pipeline.files import read_json, write_json, write_text
from pipeline.plan.jobs import make_plan
from pipeline.run.attempts import past_attempts
from pipeline.run.folder import Run
from pipeline.slurm.arrays import count_states, names, task_numbers

ARRAY = ("tokenize.array_tasks=8", "tokenize.max_running_tasks=3")


@pytest.mark.parametrize(
    ("job_id", "tasks"),
    [
        ("12", []), ("12_4", [4]), ("12_[0-3,7%2]", [0, 1, 2, 3, 7]), ("12_[5]", [5]), ("12_[0-6:3]", [0, 3, 6]),
        ("12_[1,3,...]", [1, 3]), ("12_[", []),
    ],
)  # fmt: skip
def test_the_names_of_tasks(job_id: str, tasks: list[int]) -> None:
    assert task_numbers(job_id) == tasks
    assert all(names(job_id, f"12_{task}") for task in tasks)
    assert not names(job_id, "12_9")
    assert not names(job_id, "1_4")


def test_tasks_are_counted_by_state() -> None:
    found = [("12_[3-5%2]", "pending"), ("12_0", "running"), ("12_1", "running"), ("13", "running")]
    assert count_states(found) == {"pending": 3, "running": 2}


def test_three_jobs_one_after_another_and_the_array_between() -> None:
    config = Config.model_validate({"name": "golden", "tokenize": {"array_tasks": 8, "max_running_tasks": 3}})
    plan = make_plan(config, SITE, Run(Path("/runs/golden")))
    jobs = plan.jobs[:4]
    assert [(job.name, job.stage, job.after) for job in jobs] == [
        ("tokenizer", "tokenize", []), ("encode", "tokenize", ["afterok:tokenizer"]),
        ("index", "tokenize", ["afterok:encode"]), ("pretrain", "pretrain", ["afterok:index", "singleton"]),
    ]  # fmt: skip
    assert "--array=0-7%3" in jobs[1].command
    assert jobs[1].command[-3:] == ["/runs/golden/snapshot/sbatch/tokenize.sbatch", "/runs/golden", "encode"]
    one = make_plan(config.model_copy(update={"tokenize": config.tokenize.model_copy(update={"array_tasks": 1})}), SITE,
                    Run(Path("/runs/golden")))  # fmt: skip
    assert [job.name for job in one.jobs] == ["tokenize", "pretrain", "evaluate", "inference"]


@pytest.fixture
def site(tmp_path: Path, micro: Path, pipeline: Pipeline) -> Site:
    site = Site(tmp_path, micro, pipeline)
    (site.folder / "max_array_size").write_text("5")
    done = site.submit(*ARRAY)
    assert done.returncode == 0, done.stderr
    return site


def test_no_more_tasks_than_slurm_allows_and_a_second_call_adds_nothing(site: Site) -> None:
    jobs = site.by_name()
    assert list(jobs) == ["tokenizer", "encode", "index", "pretrain", "evaluate", "inference"]
    assert "--array=0-4%3" in jobs["encode"]["words"]
    assert jobs["index"]["dependency"] == f"afterok:{jobs['encode']['id']}"
    assert jobs["pretrain"]["dependency"] == f"afterok:{jobs['index']['id']},singleton"
    site.set("tokenizer", "COMPLETED")
    assert site.submit(*ARRAY).returncode == 0
    assert len(site.queue) == 6  # the phase that is over is not begun again under the one that runs


def test_phases_that_are_queued_stand_for_the_single_job_of_a_later_plan(site: Site) -> None:
    done = site.submit("tokenize.array_tasks=1")
    assert done.returncode == 0, done.stderr
    assert len(site.queue) == 6
    assert site.by_name()["pretrain"]["dependency"] == f"afterok:{site.by_name()['index']['id']},singleton"
    again = site.submit("tokenize.array_tasks=4")
    assert again.returncode == 0, again.stderr
    assert len(site.queue) == 6
    site.set("tokenizer", "RUNNING")
    site.set("encode", "CANCELLED")  # and with it all that waits for it
    refused = site.submit("tokenize.array_tasks=1")
    assert refused.returncode == 3
    assert "tokenizer of an earlier plan (job 101) is at work" in refused.stderr


def test_a_single_job_that_is_queued_stands_for_the_phases_of_a_later_plan(
    tmp_path: Path, micro: Path, pipeline: Pipeline
) -> None:
    site = Site(tmp_path, micro, pipeline)
    (site.folder / "max_array_size").write_text("5")
    site.submit()
    site.set("pretrain", "CANCELLED")
    assert site.submit(*ARRAY).returncode == 0
    assert site.ids("tokenize") == ["101"]
    assert not site.ids("tokenizer")
    assert site.by_name()["pretrain"]["dependency"] == "afterok:101,singleton"


def test_status_tells_of_the_array_in_one_line_by_one_call(site: Site) -> None:
    encode, run = site.by_name()["encode"]["id"], site.run
    site.set("tokenizer", "COMPLETED")
    for task, verdict in ((0, "complete"), (1, None)):
        write_text(run.log("tokenize", f"{encode}_{task}", 0), "")
        if verdict:
            write_json(run.verdict(f"{encode}_{task}", 0), {"verdict": verdict, "stage": "tokenize", "time": 9.0})
    tasks = [(f"{encode}_1", "RUNNING", "n1"), (f"{encode}_[2-4%3]", "PENDING", "")]
    others = [job | {"id": job_id} for job_id, job in site.queue.items() if job_id != encode]
    token = {"comment": site.queue[encode]["comment"]}
    jobs = [{"id": name, "state": state, "nodes": nodes} | token for name, state, nodes in tasks]
    site.says("squeue", squeue_list([*others, *jobs]))
    (site.folder / "calls").unlink()
    found = json.loads(site.verb("status", run.root, "--json").stdout)
    (job,) = [job for job in found["jobs"] if job["phase"] == "encode"]
    assert (job["state"], job["reason"]) == ("running", "1 of 5 tasks complete, 1 running, 3 pending")
    assert len(site.calls("squeue")) == 1
    write_json(run.verdict(f"{encode}_1", 0), {"verdict": "config", "reason": "a.jsonl:3: not JSON", "time": 9.0})
    failed = {"id": f"{encode}_1", "state": "FAILED", "exit_code": "512", "nodes": "n1", "reason": "NonZeroExitCode"}
    site.says("squeue", squeue_list([*others, failed | token]))
    found = json.loads(site.verb("status", run.root, "--json").stdout)
    (job,) = [job for job in found["jobs"] if job["phase"] == "encode"]
    assert (job["state"], job["reason"]) == ("failed", "1 of 5 tasks complete; config: a.jsonl:3: not JSON")
    assert job["log"] == f"logs/tokenize-{encode}_1.0.log"


def begun(site: Site) -> tuple[Script, Script]:
    """Return two tasks of the array, when there is a tokenizer."""
    site.run.tokenizer.parent.mkdir(exist_ok=True)
    site.run.tokenizer.touch()
    return Script(site, "encode", task="1/5"), Script(site, "encode", task="2/5")


def test_tasks_begin_side_by_side_and_each_counts_its_own_attempts(site: Site) -> None:
    one, two = begun(site)
    assert one.ask("begin").returncode == 0
    assert two.ask("begin").returncode == 0  # and the first is neither lost nor in its way
    assert not one.run.verdict(one.job_id, 0).exists()
    assert read_json(one.run.owner_of("tokenize", one.job_id))["job_id"] == one.job_id
    assert not one.run.owner.exists()
    assert Script(site, "encode", 1, task="1/5").ask("begin").returncode == 0  # requeued: only its own attempt is lost
    assert [(a.number, a.verdict) for a in past_attempts(site.run, "tokenize", "encode/1/5")] == [(0, "lost")]
    assert past_attempts(site.run, "tokenize", "encode/2/5") == []


def test_a_task_that_encoded_pieces_goes_on_and_one_that_did_not_ends(site: Site) -> None:
    scripts, queue = begun(site), site.queue
    for script in scripts:
        queue[script.job_id] = queue[site.by_name()["encode"]["id"]] | {"state": "RUNNING"}
    (site.folder / "jobs.json").write_text(json.dumps(queue))
    for script, code, state in zip(scripts, (0, 75), ("PENDING", "RUNNING"), strict=True):
        script.ask("begin")
        script.run.piece(6).mkdir(parents=True)  # the first task's: 6 % 5
        script.says("stopped", "stopped by USR2")
        assert script.end().returncode == code
        assert script.state == state
        site.run.piece(6).rmdir()
