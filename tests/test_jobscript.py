"""What the batch shell asks at the beginning and the end of an attempt, with a small Slurm on PATH."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import environment
from slurm_site import Pipeline, Site

from pipeline.config.yaml12 import load_document
from pipeline.config.yaml12_dump import dump
from pipeline.files import read_json, read_lines, write_json
from pipeline.run.attempts import Beginning, read_attempts
from pipeline.run.owner import take
from pipeline.run.verdict import write_verdict
from pipeline.slurm.bad_nodes import BadNodes

NOTHING_TO_DO = 100


class Script:
    """The questions of sbatch/lib.sh, asked for one attempt of pretrain."""

    def __init__(self, site: Site, segment: str, number: int = 0) -> None:
        self.site, self.run, self.number = site, site.run, number
        self.job_id = site.by_name()[segment]["id"]

    def ask(self, verb: str, *words: object, nodes: str = "n1") -> subprocess.CompletedProcess[str]:
        changes = self.site.changes | {"SLURM_JOB_NODELIST": nodes, "SLURM_JOB_ID": self.job_id}
        return subprocess.run(
            [sys.executable, "-m", "pipeline.host.jobscript", verb, str(self.run.root), "pretrain", self.job_id,
             str(self.number), *map(str, words)],
            capture_output=True, text=True, env=environment() | changes, timeout=60, check=False,
        )  # fmt: skip

    def begin(self, nodes: str = "n1") -> subprocess.CompletedProcess[str]:
        self.site.set_id(self.job_id, "RUNNING", nodes=nodes, restarts=self.number)
        return self.ask("begin", nodes=nodes)

    def end(self, status: int = 0) -> subprocess.CompletedProcess[str]:
        return self.ask("end", status, "slurm")

    def says(self, verdict: str, reason: str = "", **more: object) -> None:
        """Leave the verdict that rank 0 would."""
        write_verdict(self.run, self.job_id, self.number, "pretrain", verdict, reason, None)
        path = self.run.verdict(self.job_id, self.number)
        write_json(path, read_json(path) | more)

    def checkpoint(self, step: int) -> None:
        folder = self.run.checkpoint(step)
        folder.mkdir(parents=True)
        write_json(folder / "manifest.json", {"step": step})

    @property
    def state(self) -> str:
        return str(self.site.queue[self.job_id]["state"])


@pytest.fixture
def site(tmp_path: Path, micro: Path, pipeline: Pipeline) -> Site:
    site = Site(tmp_path, micro, pipeline)
    assert site.submit("pretrain.segments=3").returncode == 0
    site.set("tokenize", "COMPLETED")
    return site


def test_an_attempt_begins_and_owns_the_run(site: Site) -> None:
    script = Script(site, "pretrain-1")
    begun = script.begin("n1,n2")
    assert begun.returncode == 0, begun.stderr
    record = read_json(script.run.beginning(script.job_id, 0))
    assert (record["nodes"], record["before"]) == (["n1", "n2"], -1)
    assert read_json(script.run.owner)["job_id"] == script.job_id


def test_a_run_is_taken_over_from_a_job_that_slurm_has_forgotten(site: Site) -> None:
    script = Script(site, "pretrain-1")
    take(site.run.owner, "7", 0)
    begun = script.begin()
    assert begun.returncode == 0, begun.stderr
    assert read_json(site.run.owner)["job_id"] == script.job_id


def test_a_segment_left_over_finds_nothing_to_do(site: Site) -> None:
    script = Script(site, "pretrain-3")
    script.checkpoint(20)
    assert script.begin().returncode == NOTHING_TO_DO
    assert not script.run.beginning(script.job_id, 0).exists()


def test_complete_early_lets_dependants_go_and_cancels_the_segments_left_over(site: Site) -> None:
    script = Script(site, "pretrain-1")
    script.begin()
    script.checkpoint(20)
    script.says("complete")
    assert script.end().returncode == 0
    jobs = site.by_name()
    assert [jobs[name]["state"] for name in ("pretrain-2", "pretrain-3")] == ["CANCELLED", "CANCELLED"]
    assert [jobs[name]["dependency"] for name in ("evaluate", "inference")] == [f"afterok:{script.job_id}"] * 2
    assert [jobs[name]["state"] for name in ("evaluate", "inference")] == ["PENDING", "PENDING"]


def test_a_segment_that_was_warned_leaves_the_rest_to_the_next(site: Site) -> None:
    script = Script(site, "pretrain-1")
    script.begin()
    script.checkpoint(10)
    script.run.warned(script.job_id, 0).write_text("USR2\n")
    script.says("stopped", "asked to stop by USR2")
    assert script.end().returncode == 0
    assert script.state == "RUNNING"  # not requeued
    assert site.by_name()["pretrain-2"]["state"] == "PENDING"


def test_the_last_segment_requeues_itself(site: Site) -> None:
    script = Script(site, "pretrain-3")
    script.begin()
    script.checkpoint(10)
    script.says("stopped", "asked to stop by USR2")
    assert script.end().returncode == 0
    assert script.state == "PENDING"
    assert [event["event"] for event in read_lines(script.run.events)][-1] == "requeue"


def test_where_requeue_is_denied_the_way_on_is_printed(site: Site) -> None:
    script = Script(site, "pretrain-3")
    script.begin()
    script.checkpoint(10)
    script.says("stopped", "asked to stop by USR2")
    (site.folder / "no_requeue").touch()
    ended = script.end()
    assert ended.returncode == 75
    assert f"resume {script.run.root}" in ended.stdout


@pytest.mark.parametrize(("verdict", "code"), [("diverged", 5), ("config", 2), ("storage", 4)])
def test_what_cannot_heal_cancels_the_rest_of_the_chain(site: Site, verdict: str, code: int) -> None:
    script = Script(site, "pretrain-1")
    script.begin()
    script.says(verdict, "it was so")
    assert script.end().returncode == code
    rest = ("pretrain-2", "pretrain-3", "evaluate", "inference")
    assert {site.by_name()[name]["state"] for name in rest} == {"CANCELLED"}


def test_a_chain_that_is_resumed_is_not_held_against_what_was_mended(site: Site) -> None:
    script = Script(site, "pretrain-1")
    script.begin()
    script.says("config", "mend this key")
    assert script.end().returncode == 2
    site.set("pretrain-1", "FAILED")
    rest = Script(site, "pretrain-2")
    assert rest.ask("begin").returncode == 2  # of the same chain
    assert site.verb("resume", site.run.root).returncode == 0
    again = Script(site, "pretrain-1")
    assert again.job_id != script.job_id
    begun = again.begin()
    assert begun.returncode == 0, begun.stderr


def test_two_attempts_without_a_step_end_the_chain_and_give_both_reasons(site: Site) -> None:
    first = Script(site, "pretrain-1")
    first.begin()
    first.says("crash", "rank 3: ValueError: batch 1")
    assert first.end(1).returncode == 1
    assert site.by_name()["pretrain-2"]["state"] == "PENDING"
    site.set("pretrain-1", "FAILED")
    second = Script(site, "pretrain-2")
    assert second.begin().returncode == 0
    second.says("crash", "rank 5: ValueError: batch 2")
    ended = second.end(1)
    assert ended.returncode == 6
    assert "ValueError: batch 1" in ended.stderr
    assert "ValueError: batch 2" in ended.stderr
    assert site.by_name()["evaluate"]["state"] == "CANCELLED"


def test_a_bad_node_is_remembered_and_kept_from_what_waits(site: Site) -> None:
    script = Script(site, "pretrain-1")
    script.begin("n1,n2")
    script.says("environment", "n2: 7 GPUs, 8 wanted", nodes=["n2"])
    assert script.end(3).returncode == 3
    (bad,) = read_lines(site.run.root.parent / ".ours" / "bad_nodes.jsonl")
    assert (bad["node"], bad["reason"]) == ("n2", "n2: 7 GPUs, 8 wanted")
    assert site.by_name()["pretrain-2"]["excluded"] == "n2"


def test_an_attempt_on_a_bad_node_goes_elsewhere(site: Site) -> None:
    state = site.run.root.parent / ".ours"
    state.mkdir()
    (state / "bad_nodes.jsonl").write_text(json.dumps({"node": "n2", "reason": "ECC", "until": 9e9}) + "\n")
    script = Script(site, "pretrain-1")
    begun = script.begin("n1,n2")
    assert begun.returncode == 3
    assert "n2 (ECC)" in begun.stderr
    assert (script.state, site.queue[script.job_id]["excluded"]) == ("PENDING", "n2")


def test_an_earlier_attempt_without_verdict_counts_as_lost(site: Site) -> None:
    Script(site, "pretrain-1").begin("n1")
    again = Script(site, "pretrain-1", number=1)
    assert again.begin("n2").returncode == 0
    assert [(a.number, a.verdict) for a in read_attempts(site.run, "pretrain")] == [(0, "lost")]


def test_memory_that_ran_out_is_named_with_the_key_to_change(site: Site) -> None:
    script = Script(site, "pretrain-1")
    script.begin()
    site.run.log("pretrain", script.job_id, 0).write_text(
        "slurmstepd: error: Detected 1 oom_kill event in StepId=9.0.\n"
    )
    assert script.end(137).returncode == 1
    record = read_json(site.run.verdict(script.job_id, 0))
    assert record["verdict"] == "out_of_memory"
    assert "micro_batch_size" in record["reason"]


def test_the_first_error_of_a_log_stands_for_a_verdict_that_is_not_there(site: Site) -> None:
    script = Script(site, "pretrain-1")
    script.begin()
    log = "Traceback (most recent call last):\n  File …\nModuleNotFoundError: No module named 'torch'\nsrun: error: n1: task 0: Exited\n"
    site.run.log("pretrain", script.job_id, 0).write_text(log)
    assert script.end(143).returncode == 1  # srun's own for a step in which a task failed
    assert "No module named 'torch'" in read_json(site.run.verdict(script.job_id, 0))["reason"]


def test_a_node_that_cannot_start_the_image_is_named_and_left(site: Site) -> None:
    script = Script(site, "pretrain-1")
    script.begin("n1,n2")
    written = load_document(site.run.cluster, "cluster file", "").data | {"image": "/shared/train.sqsh"}
    site.run.cluster.write_text(dump(written))
    said = "slurmstepd-n2: error: pyxis:     write: No space left on device\nsrun: error: n2: task 1: Exited with exit code 1\n"
    site.run.log("pretrain", script.job_id, 0).write_text(said)
    assert script.ask("end", 1, "slurm", nodes="n1,n2").returncode == 3
    record = read_json(site.run.verdict(script.job_id, 0))
    assert (record["verdict"], record["nodes"]) == ("environment", ["n2"])
    assert record["reason"].startswith(
        "n2: Enroot has no room for the image: write: No space left on device; free space"
    )


def test_blame_is_taken_back_where_the_next_node_fails_in_the_same_words(site: Site) -> None:
    listed = site.run.root.parent / ".ours" / "bad_nodes.jsonl"
    for number in (1, 2):
        script = Script(site, f"pretrain-{number}")
        assert script.begin(f"n{number}").returncode == 0
        script.says("environment", f"n{number}: torch.cuda.is_available() is False", nodes=[f"n{number}"])
        ended = script.ask("end", 3, "slurm", nodes=f"n{number}")
        assert ended.returncode == (3 if number == 1 else 6), ended.stderr
        site.set(f"pretrain-{number}", "FAILED")
        assert list(BadNodes(listed).read()) == (["n1"] if number == 1 else [])


def test_preemption_is_told_from_a_time_limit_by_the_time(site: Site) -> None:
    early = Script(site, "pretrain-1")
    early.begin()
    site.run.warned(early.job_id, 0).write_text("TERM\n")
    early.says("stopped", "asked to stop by TERM")
    early.end()
    site.set("pretrain-1", "COMPLETED")
    late = Script(site, "pretrain-2")
    late.begin()
    began = Beginning(late.job_id, 0, "pretrain", ["n1"], -1, time.time() - 3600)
    began.write(site.run)
    site.run.warned(late.job_id, 0).write_text("USR2\n")
    late.says("stopped", "asked to stop by USR2")
    late.end()
    assert [a.preempted for a in sorted(read_attempts(site.run, "pretrain"), key=lambda a: a.job_id)] == [True, False]


def test_a_script_on_a_node_that_was_given_up_acts_on_nothing(site: Site) -> None:
    script = Script(site, "pretrain-1")
    script.begin()
    take(site.run.owner, script.job_id, 1)  # the later attempt
    before = site.queue
    ended = script.end(1)
    assert ended.returncode == 1
    assert "another attempt has taken" in ended.stderr
    assert site.queue == before
    assert not site.run.verdict(script.job_id, 0).exists()


def test_a_persons_stop_ends_the_chain(site: Site) -> None:
    script = Script(site, "pretrain-1")
    site.run.stop.touch()
    begun = script.begin()
    assert begun.returncode == 75
    assert {site.by_name()[name]["state"] for name in ("pretrain-2", "pretrain-3", "evaluate")} == {"CANCELLED"}
