"""What the batch shell asks at the beginning and the end of an attempt, with a small Slurm on PATH."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import environment
from slurm_site import NO_SUBMIT, KeptSite, Script, Site

from pipeline.config.yaml12 import load_document
from pipeline.config.yaml12_dump import dump
from pipeline.files import read_json, read_lines
from pipeline.hints import shown
from pipeline.run.attempts import all_attempts, past_attempts
from pipeline.run.owner import current, take
from pipeline.run.records import BeginRecord
from pipeline.slurm.bad_nodes import BadNodes

NOTHING_TO_DO = 100
FULL = "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (AssocMaxSubmitJobLimit)"


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> KeptSite:
    return KeptSite(tmp_path_factory.mktemp("site"), corpus)


@pytest.fixture
def site(kept: KeptSite) -> Site:
    return kept.restore()


@pytest.fixture
def three(tmp_path: Path, corpus: Path) -> Site:
    """A chain of three Segments on nodes that may not submit."""
    return KeptSite(tmp_path, corpus, NO_SUBMIT, "pretrain.segments=3")


def test_the_script_asks_by_a_module_and_a_wrong_question_is_answered_with_its_usage(site: Site) -> None:
    for words in (["begin", site.run.root], ["tend", site.run.root, "7", "no number"], ["dance"]):
        asked = subprocess.run(
            [sys.executable, "-m", "pipeline.host.jobscript", *map(str, words)], capture_output=True, text=True,
            env=environment(), timeout=60, check=False,
        )  # fmt: skip
        assert (asked.returncode, asked.stderr[:6]) == (2, "usage:")


def test_an_attempt_begins_and_owns_the_run(site: Site) -> None:
    script = Script(site)
    begun = script.begin("n[1-2]")
    assert begun.returncode == 0, begun.stderr
    record = BeginRecord.read(script.run.beginning(script.job_id, 0))
    assert record is not None
    assert (record.nodes, record.step_at_start, record.stage) == (["n1", "n2"], -1, "pretrain")
    assert read_json(script.run.owner)["job_id"] == script.job_id
    assert script.run.allocation(script.job_id, 0).read_text() == "PIPELINE_NODES=n1,n2\n"


def test_a_run_is_taken_over_from_a_job_that_slurm_has_forgotten(site: Site) -> None:
    script = Script(site)
    take(site.run.owner, "7", 0)
    begun = script.begin()
    assert begun.returncode == 0, begun.stderr
    assert read_json(site.run.owner)["job_id"] == script.job_id


def test_a_segment_left_over_finds_nothing_to_do(three: Site) -> None:
    script = Script(three, "pretrain", at=2)
    script.checkpoint(20)
    assert script.begin().returncode == NOTHING_TO_DO
    assert not script.run.beginning(script.job_id, 0).exists()


def test_a_successor_that_begins_when_training_is_complete_finds_nothing_to_do(site: Site) -> None:
    Script(site).begin()
    script = Script(site)
    script.checkpoint(20)
    assert script.begin().returncode == NOTHING_TO_DO
    assert not script.run.beginning(script.job_id, 0).exists()
    assert len(site.ids("pretrain")) == 2


def test_complete_early_lets_dependants_go_and_cancels_the_successor(site: Site) -> None:
    script = Script(site)
    script.begin()
    script.checkpoint(20)
    script.says("complete")
    assert script.end().returncode == 0
    (_, successor), jobs = site.ids("pretrain"), site.by_name()
    assert site.states("pretrain") == ["RUNNING", "CANCELLED"]
    assert [jobs[name]["dependency"] for name in ("evaluate", "inference")] == [f"afterany:{successor}"] * 2
    assert [jobs[name]["state"] for name in ("evaluate", "inference")] == ["PENDING", "PENDING"]


def test_complete_early_although_slurm_does_not_answer_is_complete(site: Site) -> None:
    script = Script(site)
    script.begin()
    script.checkpoint(20)
    script.says("complete")
    site.says("squeue", "<html>no list</html>")
    assert script.end().returncode == 0
    site.says("squeue", None)
    assert site.states("pretrain") == ["RUNNING", "PENDING"]  # it finds nothing to do
    assert [site.by_name()[name]["state"] for name in ("evaluate", "inference")] == ["PENDING", "PENDING"]


def test_a_segment_that_was_warned_leaves_the_rest_to_the_next(site: Site) -> None:
    script = Script(site)
    script.begin()
    script.checkpoint(10)
    script.warned()
    script.says("stopped", "asked to stop by USR2")
    assert script.end().returncode == 0
    assert site.states("pretrain") == ["RUNNING", "PENDING"]  # not requeued


def test_an_attempt_without_a_successor_requeues_itself(site: Site) -> None:
    script = Script(site)
    site.refuses(FULL)
    assert script.begin().returncode == 0
    script.checkpoint(10)
    script.says("stopped", "asked to stop by USR2")
    assert script.end().returncode == 0
    assert site.states("pretrain") == ["PENDING"]
    assert [event["event"] for event in read_lines(script.run.events)][-1] == "requeue"


def test_where_requeue_is_denied_the_way_on_is_printed(site: Site) -> None:
    script = Script(site)
    site.refuses(FULL)
    script.begin()
    script.checkpoint(10)
    script.says("stopped", "asked to stop by USR2")
    (site.folder / "no_requeue").touch()
    ended = script.end()
    assert ended.returncode == 75
    assert f"resume {shown(script.run.root)}" in ended.stderr


@pytest.mark.parametrize(("verdict", "code"), [("diverged", 5), ("config", 2), ("storage", 4)])
def test_what_cannot_heal_cancels_the_rest_of_the_chain(site: Site, verdict: str, code: int) -> None:
    script = Script(site)
    script.begin()
    script.says(verdict, "it was so")
    assert script.end().returncode == code
    assert site.states("pretrain") == ["RUNNING", "CANCELLED"]
    assert {site.by_name()[name]["state"] for name in ("evaluate", "inference")} == {"CANCELLED"}


def test_a_chain_that_is_resumed_is_not_held_against_what_was_mended(site: Site) -> None:
    script = Script(site)
    script.begin()
    script.says("config", "mend this key")
    site.says("scancel", "")  # it does not come through, so that the successor begins
    assert script.end().returncode == 2
    site.says("scancel", None)
    site.set_id(script.job_id, "FAILED")
    rest = Script(site)
    assert rest.job_id != script.job_id
    refused = rest.begin()
    assert refused.returncode == 2, refused.stderr  # of the same chain
    assert "mend this key" in refused.stderr
    site.set_id(rest.job_id, "FAILED")
    for follower in ("evaluate", "inference"):
        site.set(follower, "CANCELLED")
    assert site.verb("resume", site.run.root).returncode == 0
    again = Script(site)
    assert again.job_id not in (script.job_id, rest.job_id)
    begun = again.begin()
    assert begun.returncode == 0, begun.stderr


def test_two_attempts_without_a_step_end_the_chain_and_give_both_reasons(site: Site) -> None:
    first = Script(site)
    first.begin()
    first.says("crash", "rank 3: ValueError: batch 1")
    assert first.end(1).returncode == 1
    assert site.by_name()["pretrain"]["state"] == "PENDING"
    site.set_id(first.job_id, "FAILED")
    second = Script(site)
    assert second.begin().returncode == 0
    second.says("crash", "rank 5: ValueError: batch 2")
    ended = second.end(1)
    assert ended.returncode == 6
    assert "ValueError: batch 1" in ended.stderr
    assert "ValueError: batch 2" in ended.stderr
    assert site.states("pretrain")[-1] == "CANCELLED"
    assert site.by_name()["evaluate"]["state"] == "CANCELLED"


def test_a_bad_node_is_remembered_and_kept_from_what_waits(site: Site) -> None:
    script = Script(site)
    script.begin("n1,n2")
    script.says("environment", "n2: 7 GPUs, 8 wanted", nodes=("n2",))
    assert script.end(3, "n1,n2").returncode == 3
    (bad,) = BadNodes(site.run.root.parent / ".ours").read().values()
    assert (bad.name, bad.reason) == ("n2", "n2: 7 GPUs, 8 wanted")
    assert Script(site).job_id != script.job_id
    assert site.by_name()["pretrain"]["excluded"] == "n2"


def test_an_attempt_on_a_bad_node_goes_elsewhere(site: Site) -> None:
    state = site.run.root.parent / ".ours"
    state.mkdir()
    (state / "bad_nodes.jsonl").write_text(json.dumps({"node": "n2", "reason": "ECC", "until": 9e9}) + "\n")
    script = Script(site)
    begun = script.begin("n1,n2")
    assert begun.returncode == 3
    assert "n2 (ECC)" in begun.stderr
    assert (script.state, site.queue[script.job_id]["excluded"]) == ("PENDING", "n2")


def test_an_earlier_attempt_without_verdict_counts_as_lost(site: Site) -> None:
    Script(site).begin("n1")
    again = Script(site, number=1, at=0)
    assert again.begin("n2").returncode == 0
    assert [(a.number, a.verdict) for a in past_attempts(site.run, "pretrain")] == [(0, "lost")]
    assert len(site.ids("pretrain")) == 2  # its successor is its own still


def test_memory_that_ran_out_is_named_with_the_key_to_change(site: Site) -> None:
    script = Script(site)
    script.begin()
    site.run.log("pretrain", script.job_id, 0).write_text(
        "slurmstepd: error: Detected 1 oom_kill event in StepId=9.0.\n"
    )
    assert script.end(137).returncode == 1
    assert script.verdict["verdict"] == "out_of_memory"
    assert "micro_batch_size" in script.verdict["reason"]


def test_the_first_error_of_a_log_stands_for_a_verdict_that_is_not_there(site: Site) -> None:
    script = Script(site)
    script.begin()
    log = "Traceback (most recent call last):\n  File …\nModuleNotFoundError: No module named 'torch'\nsrun: error: n1: task 0: Exited\n"
    site.run.log("pretrain", script.job_id, 0).write_text(log)
    assert script.end(143).returncode == 1  # srun's own for a step in which a task failed
    assert "No module named 'torch'" in script.verdict["reason"]


def test_a_node_that_cannot_start_the_image_is_named_and_left(site: Site) -> None:
    script = Script(site)
    script.begin("n1,n2")
    written = load_document(site.run.cluster, "cluster file", "").data | {"image": "/shared/train.sqsh"}
    site.run.cluster.write_text(dump(written))
    said = "slurmstepd-n2: error: pyxis:     write: No space left on device\nsrun: error: n2: task 1: Exited with exit code 1\n"
    site.run.log("pretrain", script.job_id, 0).write_text(said)
    assert script.end(1, "n1,n2").returncode == 3
    assert (script.verdict["verdict"], script.verdict["nodes"]) == ("environment", ["n2"])
    assert script.verdict["reason"].startswith(
        "n2: Enroot has no room for the image: write: No space left on device; free space"
    )


def test_blame_is_taken_back_where_the_next_node_fails_in_the_same_words(site: Site) -> None:
    listed = site.run.root.parent / ".ours"
    for number in (1, 2):
        script = Script(site)
        assert script.begin(f"n{number}").returncode == 0
        script.says("environment", f"n{number}: torch.cuda.is_available() is False", nodes=(f"n{number}",))
        ended = script.end(3, f"n{number}")
        assert ended.returncode == (3 if number == 1 else 6), ended.stderr
        site.set_id(script.job_id, "FAILED")
        assert list(BadNodes(listed).read()) == (["n1"] if number == 1 else [])


@pytest.mark.parametrize(("left", "warned"), [("30:00", "before its time"), ("3:00", "time limit")])
def test_preemption_is_told_from_a_time_limit_by_the_limit_that_slurm_gave(site: Site, left: str, warned: str) -> None:
    script = Script(site)
    script.begin(left=left)
    script.warned("TERM")
    script.says("stopped", "asked to stop by TERM")
    script.end()
    assert script.verdict["warned"] == warned
    (attempt,) = past_attempts(site.run, "pretrain")
    assert attempt.preempted == (warned == "before its time")


def test_a_warning_with_a_long_lead_is_no_preemption(site: Site) -> None:
    """Slow saves have the Job warned long before its limit; what was recorded at the beginning counts, not a rule."""
    script = Script(site)
    entry = site.run.job_record(2)
    assert read_json(entry)["job_id"] == script.job_id
    entry.write_text(json.dumps(read_json(entry) | {"signal_lead": 1500}))
    script.begin(left="30:00")
    path = site.run.beginning(script.job_id, 0)
    assert read_json(path)["signal_lead"] == 1500
    assert abs(read_json(path)["deadline"] - time.time() - 1800) < 60
    path.write_text(json.dumps(read_json(path) | {"deadline": time.time() + 1490}))  # 310 s later
    script.warned()
    script.says("stopped", "asked to stop by USR2")
    script.end()
    assert script.verdict["warned"] == "time limit"


def test_a_script_on_a_node_that_was_given_up_acts_on_nothing(site: Site) -> None:
    script = Script(site)
    script.begin()
    take(site.run.owner, script.job_id, 1)  # the later attempt
    before = site.queue
    ended = script.end(1)
    assert ended.returncode == 1
    assert "another attempt has taken" in ended.stderr
    assert site.queue == before
    assert not site.run.verdict(script.job_id, 0).exists()


def test_a_persons_stop_ends_the_chain(site: Site) -> None:
    script = Script(site)
    site.run.stop.touch()
    begun = script.begin()
    assert begun.returncode == 75
    assert {site.by_name()[name]["state"] for name in ("evaluate", "inference")} == {"CANCELLED"}
    assert site.states("pretrain") == ["RUNNING"]  # and none was queued behind it
    assert current(site.run.owner)[1] is None


def test_a_persons_stop_ends_the_chain_also_while_it_works(site: Site) -> None:
    script = Script(site)
    script.begin()
    site.run.stop.touch()
    script.says("stopped", "control/stop")
    assert script.end().returncode == 75
    assert site.states("pretrain") == ["RUNNING", "CANCELLED"]
    assert [one.verdict is not None for one in all_attempts(site.run)] == [True]
