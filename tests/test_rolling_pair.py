"""The chain's rolling pair: one works, one waits, whatever people, Slurm and disks do to them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from fake_slurm import read, write
from slurm_site import NO_SUBMIT, Clock, KeptSite, Script, Site

from pipeline.files import read_json, read_lines, write_json
from pipeline.hints import shown
from pipeline.host import begin as host_begin
from pipeline.host import lease
from pipeline.run.attempts import past_attempts
from pipeline.run.folder import Run
from pipeline.run.job_ledger import entry_of, read_ledger
from pipeline.run.owner import current

NOTHING_TO_DO = 100
NO_LIST = "<html>503 Service Unavailable</html>"
FULL = "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (AssocMaxSubmitJobLimit)"
FOLLOWERS = ("evaluate", "inference")


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> KeptSite:
    return KeptSite(tmp_path_factory.mktemp("site"), corpus)


@pytest.fixture
def site(kept: KeptSite) -> Site:
    return kept.restore()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def by_hand(site: Site, job_id: str = "900") -> Script:
    """Let a person have submitted the job script by sbatch: no token, no entry, the script's own name."""
    jobs = read(site.folder)
    jobs[job_id] = {
        "state": "RUNNING", "reason": "", "comment": "", "kill": False, "dependency": "", "name": "pretrain",
        "words": [], "excluded": "",
    }  # fmt: skip
    write(site.folder, jobs)
    return Script(site, job_id=job_id)


def another(site: Site, job_id: str, dependency: str = "singleton") -> str:
    """Queue one more successor, as somebody who did not see that there is one; return its id."""
    number = len(read_ledger(site.run)) + 1
    first = read_json(site.run.job_record(2))
    token = first["token"].rpartition(".")[0] + f".{number:06d}"
    entry = first | {"number": number, "token": token, "job_id": job_id, "dependency": dependency}
    write_json(site.run.job_record(number), entry)
    jobs = site.queue
    jobs[job_id] = jobs[first["job_id"]] | {"state": "PENDING", "comment": token, "dependency": dependency}
    write(site.folder, jobs)
    return job_id


def written(run: Run) -> dict[str, bytes]:
    """Return all that an attempt or the chain may have written, but for the log of events and the claims' touch."""
    folders = (run.attempts, run.control, run.job_records)
    return {str(path): path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file()}


def events(site: Site) -> list[str]:
    return [event["event"] for event in read_lines(site.run.events)]


# A successor is always queued


def test_where_saves_are_slow_the_successor_is_warned_earlier(site: Site) -> None:
    script = Script(site)
    script.checkpoint(10)
    site.run.event("save", stage="pretrain", step=10, seconds=100.0)
    assert script.begin().returncode == 0
    words = site.by_name()["pretrain"]["words"]
    assert "--signal=B:USR2@300" in words, words


def test_an_attempt_queues_one_successor_of_the_same_name_and_the_rest_of_the_chain_behind_it(site: Site) -> None:
    first = Script(site)
    assert first.begin().returncode == 0
    _, successor = site.ids("pretrain")
    job = site.queue[successor]
    assert job["dependency"] == f"afterany:{first.job_id},singleton"
    assert job["name"] == site.queue[first.job_id]["name"] == f"micro-pretrain-{site.id}"
    assert [site.by_name()[name]["dependency"] for name in FOLLOWERS] == [f"afterany:{successor}"] * 2
    record = entry_of(site.run, successor)
    assert record is not None
    assert (record.by, record.role, record.token) == (f"{first.job_id}.0", "chain", job["comment"])
    assert record.since == (entry_of(site.run, first.job_id) or record).since  # the same chain
    site.set_id(first.job_id, "TIMEOUT")
    second = Script(site)
    assert second.begin().returncode == 0
    third = site.ids("pretrain")[2]
    assert site.queue[third]["dependency"] == f"afterany:{successor},singleton"
    assert [site.by_name()[name]["dependency"] for name in FOLLOWERS] == [f"afterany:{third}"] * 2
    assert len(site.queue) == 6


def test_it_adopts_one_that_waits_and_cancels_a_second(site: Site) -> None:
    first = Script(site)
    one = another(site, "800", "afterany:7,singleton")
    assert first.begin().returncode == 0
    assert site.ids("pretrain") == [first.job_id, one]
    assert site.queue[one]["dependency"] == f"afterany:{first.job_id},singleton"
    assert [site.by_name()[name]["dependency"] for name in FOLLOWERS] == [f"afterany:{one}"] * 2
    second = another(site, "801")
    assert first.ask("tend").returncode == 0
    assert [site.queue[job]["state"] for job in (one, second)] == ["PENDING", "CANCELLED"]
    assert [site.by_name()[name]["dependency"] for name in FOLLOWERS] == [f"afterany:{one}"] * 2


def test_tend_queues_another_where_somebody_cancelled_the_one_that_waited(site: Site) -> None:
    first = Script(site)
    first.begin()
    site.set_id(site.ids("pretrain")[1], "CANCELLED")
    assert first.ask("tend").returncode == 0
    assert site.states("pretrain") == ["RUNNING", "CANCELLED", "PENDING"]
    third = site.ids("pretrain")[2]
    assert site.queue[third]["dependency"] == f"afterany:{first.job_id},singleton"
    assert [site.by_name()[name]["dependency"] for name in FOLLOWERS] == [f"afterany:{third}"] * 2
    before = site.queue
    assert first.ask("tend").returncode == 0
    assert site.queue == before


def test_tend_mends_the_edge_of_one_that_lost_it(site: Site) -> None:
    first = Script(site)
    first.begin()
    successor = site.ids("pretrain")[1]
    site.set_id(successor, "PENDING", dependency="")  # as a requeue leaves it
    site.set("evaluate", "PENDING", dependency="")
    assert first.ask("tend").returncode == 0
    assert site.queue[successor]["dependency"] == f"afterany:{first.job_id},singleton"
    assert site.by_name()["evaluate"]["dependency"] == f"afterany:{successor}"
    assert len(site.ids("pretrain")) == 2


def test_tend_of_an_attempt_that_was_superseded_queues_nothing(site: Site) -> None:
    first = Script(site)
    first.begin()
    site.set_id(site.ids("pretrain")[1], "CANCELLED")
    assert Script(site, at=0, number=1).begin().returncode == 0
    site.set_id(site.ids("pretrain")[2], "CANCELLED")
    before = site.queue
    assert first.ask("tend").returncode == 0
    assert site.queue == before


@pytest.mark.parametrize("answer", ["refused", "full", "none"])
def test_an_attempt_without_a_successor_begins_all_the_same_and_queues_it_at_its_end(site: Site, answer: str) -> None:
    first = Script(site)
    if answer == "none":
        site.says("sbatch", "")
    else:
        site.refuses(FULL if answer == "full" else "sbatch: error: Invalid qos specification")
    begun = first.begin()
    assert begun.returncode == 0, begun.stderr
    assert "no successor" in events(site)
    assert len(site.ids("pretrain")) == 1
    assert [site.by_name()[name]["dependency"] for name in FOLLOWERS] == [f"afterany:{first.job_id}"] * 2
    site.says("sbatch", None)
    site.refuses(None)
    first.checkpoint(10)
    first.says("stopped", "asked to stop by USR2")
    assert first.end().returncode == 0
    assert site.states("pretrain") == ["RUNNING", "PENDING"]
    assert site.by_name()["evaluate"]["dependency"] == f"afterany:{site.ids('pretrain')[1]}"


def test_while_slurm_does_not_answer_the_end_asks_again_until_the_limit_and_then_requeues(
    site: Site, clock: Clock
) -> None:
    first = Script(site)
    site.says("sbatch", "")
    first.begin(left="2:00")
    first.checkpoint(10)
    first.says("stopped", "asked to stop by USR2")
    assert first.end().returncode == 0
    assert 60 < clock.slept < 180
    assert site.states("pretrain") == ["PENDING"]
    assert events(site)[-1] == "requeue"


def test_a_full_queue_is_not_waited_for(site: Site, clock: Clock) -> None:
    first = Script(site)
    site.refuses(FULL)
    first.begin()
    first.says("crash", "rank 3: ValueError")
    first.end(1)
    assert site.states("pretrain") == ["PENDING"]  # requeued
    assert clock.slept < 30


def test_after_a_failure_without_a_step_the_successor_is_put_off_longer_each_time(site: Site) -> None:
    for number, seconds in enumerate((60, 120)):
        script = Script(site)
        script.begin()
        script.says("crash", ("ValueError: one thing", "KeyError: quite another")[number])
        assert script.end(1).returncode == 1
        assert site.by_name()["pretrain"]["begins"] == f"now+{seconds}"
        site.set_id(script.job_id, "FAILED")
    script = Script(site)
    script.begin(left="30:00")
    script.warned("TERM")
    script.says("stopped", "asked to stop by TERM")
    script.end()
    assert "begins" not in site.by_name()["pretrain"]  # preempted: nobody's fault


def test_after_attempts_that_were_killed_without_a_step_the_next_one_puts_itself_off(site: Site) -> None:
    for _ in range(2):  # the first time it is tried again at once
        script = Script(site)
        assert script.begin().returncode == 0
        site.set_id(script.job_id, "FAILED")
    third = Script(site)
    begun = third.begin()
    assert begun.returncode == NOTHING_TO_DO
    assert "waits 60 s" in begun.stderr
    assert not site.run.beginning(third.job_id, 0).exists()
    site.set_id(third.job_id, "COMPLETED")
    assert site.by_name()["pretrain"]["begins"] == "now+60"
    fourth = Script(site)
    assert fourth.job_id != third.job_id
    assert fourth.begin().returncode == 0
    fourth.checkpoint(5)
    site.set_id(fourth.job_id, "FAILED")
    assert Script(site).begin().returncode == 0  # it made a step


def test_slurm_requeues_a_segment_by_itself_only_while_no_successor_waits(site: Site) -> None:
    first = Script(site)
    assert "--no-requeue" in site.queue[first.job_id]["words"]
    site.refuses(FULL)
    first.begin()
    assert site.queue[first.job_id]["requeue"] == "1"
    site.refuses(None)
    second = Script(site, number=1)  # Slurm has done so
    assert second.begin().returncode == 0
    assert site.queue[first.job_id]["requeue"] == "0"


def test_preemptions_that_left_no_time_to_save_do_not_end_the_chain(site: Site) -> None:
    for _ in range(3):
        script = Script(site)
        assert script.begin(left="10:00:00").returncode == 0
        script.warned("TERM")  # and SIGKILL after KillWait: nobody writes a verdict
        site.set_id(script.job_id, "PREEMPTED")
    assert Script(site).begin().returncode == 0
    assert [attempt.preempted for attempt in past_attempts(site.run, "pretrain")] == [True] * 3
    assert script.verdict["reason"] == "killed after it was warned, before its save was whole"


# Who may work


def test_a_hand_start_beside_one_that_works_leaves_at_once_and_changes_nothing(site: Site, clock: Clock) -> None:
    first = Script(site)
    first.begin()
    warned = first.warned()
    hand = by_hand(site)
    queue, files = site.queue, written(site.run)
    begun = hand.begin()
    assert begun.returncode == NOTHING_TO_DO
    assert f"worked on by job {first.job_id}" in begun.stderr
    assert clock.slept == 0
    assert {k: v for k, v in site.queue.items() if k != "900"} == {k: v for k, v in queue.items() if k != "900"}
    assert written(site.run) == files
    assert warned.exists()
    assert (current(site.run.owner)[1] or {})["job_id"] == first.job_id


def test_a_finished_segment_that_is_requeued_by_hand_leaves_the_one_that_works_alone(site: Site) -> None:
    first = Script(site)
    first.begin()
    site.set_id(first.job_id, "TIMEOUT")
    second = Script(site)
    assert second.begin().returncode == 0
    files, queue = written(site.run), site.queue
    again = Script(site, at=0, number=1)
    assert again.begin().returncode == NOTHING_TO_DO
    entry = str(site.run.job_record(2))  # that it lives again is written down
    assert written(site.run) | {entry: b""} == files | {entry: b""}
    assert {k: v for k, v in site.queue.items() if k != first.job_id} == {
        k: v for k, v in queue.items() if k != first.job_id
    }


def test_a_hand_start_where_nobody_works_takes_the_run_and_has_the_waiting_one_behind_it(site: Site) -> None:
    waiting = Script(site).job_id
    hand = by_hand(site)
    assert hand.begin().returncode == 0
    assert site.ids("pretrain")[0] == waiting
    assert site.queue[waiting]["dependency"] == "afterany:900,singleton"
    assert site.by_name()["evaluate"]["dependency"] == f"afterany:{waiting}"


def test_the_run_is_taken_before_any_record_of_the_one_before_is_written(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Script(site)
    first.begin()
    warned = first.warned()
    site.set_id(first.job_id, "TIMEOUT")
    second = Script(site)

    def fails(*words: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(lease, "take", fails)
        assert second.begin().returncode == 1
    assert not first.verdict
    assert warned.exists()
    assert second.begin().returncode == 0
    assert first.verdict["verdict"] == "lost"
    assert not warned.exists()


def test_a_job_id_that_was_given_to_somebody_else_is_gone(site: Site, clock: Clock) -> None:
    first = Script(site)
    first.begin()
    for changes in ({"comment": "theirs"}, {"comment": ""}):
        site.set_id(first.job_id, "RUNNING", **changes)
        second = by_hand(site)
        assert second.begin().returncode == 0
        assert (current(site.run.owner)[1] or {})["job_id"] == "900"
        site.set_id(first.job_id, "RUNNING", comment="pipeline:" + site.id)
        lease.take(site.run.owner, first.job_id, 0)
    assert clock.slept == 0


def test_a_strangers_job_with_the_id_of_our_successor_is_neither_adopted_nor_cancelled(site: Site) -> None:
    first = Script(site)
    first.begin()
    theirs = site.ids("pretrain")[1]
    site.set_id(theirs, "PENDING", comment="pipeline:ffffffffffff:pretrain.000005", user="eve", dependency="")
    assert first.ask("tend").returncode == 0
    assert site.queue[theirs]["dependency"] == ""
    ours = site.ids("pretrain")[2]
    assert site.queue[ours]["dependency"] == f"afterany:{first.job_id},singleton"
    first.checkpoint(20)
    first.says("complete")
    assert first.end().returncode == 0
    assert [site.queue[job]["state"] for job in (theirs, ours)] == ["PENDING", "CANCELLED"]


def test_unknown_is_alive_but_for_a_later_segment_of_the_chain(
    site: Site, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "LOOK_SECONDS", 40.0)
    first = Script(site)
    first.begin()
    hand = by_hand(site)
    site.says("squeue", NO_LIST)
    site.says("scontrol", "")
    begun = hand.begin()
    assert begun.returncode == NOTHING_TO_DO
    assert clock.slept > lease.ENDING_SECONDS
    assert (current(site.run.owner)[1] or {})["job_id"] == first.job_id
    slept = clock.slept
    second = Script(site, job_id=site.ids("pretrain")[1])
    begun = second.begin()
    assert begun.returncode == 0, begun.stderr
    assert clock.slept - slept < 30
    slept = clock.slept
    earlier = Script(site, at=0, number=1)
    assert earlier.begin().returncode == NOTHING_TO_DO
    assert clock.slept - slept > lease.ENDING_SECONDS
    assert (current(site.run.owner)[1] or {})["job_id"] == second.job_id


def test_one_that_ends_is_waited_for(site: Site, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Script(site)
    first.begin()
    site.set_id(first.job_id, "COMPLETING")
    second = Script(site)
    sleep = clock.sleep

    def ends(seconds: float) -> None:
        sleep(seconds)
        if clock.slept > 20:
            site.set_id(first.job_id, "TIMEOUT")

    monkeypatch.setattr("time.sleep", ends)
    assert second.begin().returncode == 0
    assert 20 < clock.slept < 30


# The end of a script that could not ask for its end


@pytest.mark.parametrize("error", [OSError(116, "Stale file handle"), RuntimeError("a fault of ours")])
@pytest.mark.parametrize("where", ["take_over", "note_beginning", "queue_successor"])
def test_a_begin_that_died_is_rescued(
    site: Site, monkeypatch: pytest.MonkeyPatch, where: str, error: Exception
) -> None:
    first = Script(site)

    def dies(*words: object) -> int:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(host_begin.HostBegin, where, dies)
        assert first.begin().returncode == 1
    rescued = first.ask("rescue", 1)
    assert rescued.returncode == 3, rescued.stderr
    assert site.states("pretrain") == ["RUNNING", "PENDING"]
    assert site.by_name()["pretrain"]["begins"] == "now+60"
    assert "status 1 before its time" in first.verdict["reason"]
    site.set_id(first.job_id, "FAILED")
    second = Script(site)
    assert second.begin().returncode == 0
    assert [(a.job_id, a.verdict) for a in past_attempts(site.run, "pretrain")] == [(first.job_id, "environment")]


def test_the_same_rescue_twice_is_within_the_usual_bounds(site: Site) -> None:
    for code in (3, 6):
        script = Script(site)
        script.begin()
        assert script.ask("rescue", 1).returncode == code
        site.set_id(script.job_id, "FAILED")
    assert site.states("pretrain") == ["FAILED", "FAILED", "CANCELLED"]
    assert {site.by_name()[name]["state"] for name in FOLLOWERS} == {"CANCELLED"}


def test_a_rescue_that_cannot_write_says_so_by_dying_so_that_bash_puts_the_job_back(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Script(site)

    def dies(*words: object) -> int:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(lease, "take", dies)
    assert first.begin().returncode == 1
    assert first.ask("rescue", 1).returncode == 1


def test_the_rescue_of_a_hand_start_leaves_the_one_that_works_alone(site: Site) -> None:
    first = Script(site)
    first.begin()
    hand = by_hand(site)
    files = written(site.run)
    assert hand.ask("rescue", 1).returncode == 0
    assert written(site.run) == files


def test_a_rescue_keeps_what_a_rank_has_said(site: Site) -> None:
    first = Script(site)
    first.begin()
    first.says("diverged", "loss is NaN")
    assert first.ask("rescue", 2).returncode == 5
    assert first.verdict["verdict"] == "diverged"
    assert site.states("pretrain") == ["RUNNING", "CANCELLED"]


# Stages that need a whole model


@pytest.mark.parametrize("stage", FOLLOWERS)
def test_a_stage_that_begins_too_early_has_another_wait_in_its_place(site: Site, stage: str) -> None:
    first = Script(site)
    first.begin()
    successor = site.ids("pretrain")[1]
    first.checkpoint(5)
    early = Script(site, stage)
    begun = early.begin()
    assert begun.returncode == NOTHING_TO_DO, begun.stderr
    again = site.by_name()[stage]
    assert (again["id"] != early.job_id, again["dependency"]) == (True, f"afterany:{successor}")
    assert len(site.ids(stage)) == 2
    assert not site.run.beginning(early.job_id, 0).exists()
    site.set_id(early.job_id, "COMPLETED")
    site.set_id(first.job_id, "TIMEOUT")
    Script(site, job_id=successor).begin()
    assert site.by_name()[stage]["dependency"] == f"afterany:{site.ids('pretrain')[2]}"  # it is the chain's own now


@pytest.mark.parametrize("stage", FOLLOWERS)
def test_a_stage_that_begins_too_early_where_nobody_trains_says_what_to_do(site: Site, stage: str) -> None:
    site.set("pretrain", "CANCELLED")
    script = Script(site, stage)
    script.checkpoint(5)
    begun = script.begin()
    assert begun.returncode == 75
    assert "pretrain is not complete" in begun.stderr
    assert f"resume {shown(site.run.root)}" in begun.stderr
    assert site.ids(stage) == [script.job_id]


@pytest.mark.parametrize("stage", FOLLOWERS)
def test_a_stage_that_begins_too_early_in_a_full_queue_goes_back_into_it_itself(site: Site, stage: str) -> None:
    Script(site).begin()
    successor = site.ids("pretrain")[1]
    site.refuses(FULL)
    early = Script(site, stage)
    begun = early.begin()
    assert begun.returncode == NOTHING_TO_DO, begun.stderr
    assert (early.state, site.queue[early.job_id]["dependency"]) == ("PENDING", f"afterany:{successor}")


def test_a_segment_that_begins_without_tokens_waits_for_the_tokenize_that_lives(site: Site) -> None:
    site.set("tokenize", "RUNNING")
    site.run.index.unlink()
    first = Script(site)
    assert first.begin().returncode == NOTHING_TO_DO
    edge = f"afterok:{site.by_name()['tokenize']['id']},singleton"
    assert site.by_name()["pretrain"]["dependency"] == edge
    assert len(site.ids("pretrain")) == 2


@pytest.mark.parametrize("state", ["FAILED", "CANCELLED"])  # by a launch, by a prolog that failed
@pytest.mark.parametrize("stage", FOLLOWERS)
def test_where_the_last_segment_died_before_its_first_line_those_behind_it_queue_another(
    site: Site, stage: str, state: str
) -> None:
    first = Script(site)
    first.begin()
    first.checkpoint(10)
    first.says("stopped", "asked to stop by USR2")
    first.end()
    site.set_id(first.job_id, "COMPLETED")
    dead = site.ids("pretrain")[-1]
    site.set_id(dead, state, nodes="n1")
    early = Script(site, stage)
    begun = early.begin()
    assert begun.returncode == NOTHING_TO_DO, begun.stderr
    assert f"job {dead} ended without a word" in begun.stderr
    new = site.ids("pretrain")[-1]
    assert new != dead
    assert site.by_name()[stage]["dependency"] == f"afterany:{new}"
    site.set_id(early.job_id, "COMPLETED")
    again = Script(site)
    assert (again.job_id, again.begin().returncode) == (new, 0)


def test_segments_that_die_before_their_first_line_are_queued_again_later_each_time_and_not_for_ever(
    site: Site,
) -> None:
    Script(site)
    for number in range(8):
        site.set_id(site.ids("pretrain")[-1], "NODE_FAIL")
        early = Script(site, "inference")
        begun = early.begin()
        site.set_id(early.job_id, "COMPLETED")
        if number < 7:
            assert begun.returncode == NOTHING_TO_DO, begun.stderr
            later = [word for word in site.by_name()["pretrain"]["words"] if word.startswith("--begin=")]
            assert later == ([f"--begin=now+{60 << number - 1}"] if number else [])
    assert begun.returncode == 75
    assert "as 8 did in a row" in begun.stderr


def test_a_last_segment_that_a_person_cancelled_or_that_refused_is_not_queued_again(site: Site) -> None:
    site.set("pretrain", "CANCELLED")
    assert Script(site, "inference").begin().returncode == 75
    site.set("pretrain", "FAILED")
    site.run.log("pretrain", site.ids("pretrain")[-1], 0).write_text("pretrain: does not begin\n")
    assert Script(site, "inference").begin().returncode == 75
    assert len(site.ids("pretrain")) == 1


# Other folders, other clusters


@pytest.mark.parametrize("how", ["moved", "copied"])
def test_a_run_in_another_folder_refuses_and_writes_nothing(site: Site, how: str) -> None:
    script = Script(site)
    there = Run(site.run.root.with_name("elsewhere"))
    if how == "moved":
        site.run.root.rename(there.root)
    else:
        shutil.copytree(site.run.root, there.root)
    before, queue = written(there), site.queue
    script.run = there
    refused = script.begin()
    assert refused.returncode == 3
    assert how in refused.stderr
    assert f"resume {shown(there.root)}" in refused.stderr
    assert written(there) == before
    site.set_id(script.job_id, "PENDING")
    assert {i: (j["state"], j["dependency"]) for i, j in site.queue.items()} == {
        i: (j["state"], j["dependency"]) for i, j in queue.items()
    }


def test_where_nodes_may_not_submit_they_call_no_command_of_slurms(tmp_path: Path, corpus: Path, clock: Clock) -> None:
    site = KeptSite(tmp_path, corpus, NO_SUBMIT, "pretrain.segments=3")
    assert [site.queue[job]["dependency"] for job in site.ids("pretrain")] == [
        f"afterok:{site.ids('tokenize')[0]},singleton",
        *(f"afterok:{site.ids('tokenize')[0]},afterany:{job},singleton" for job in site.ids("pretrain")[:2]),
    ]
    before = site.calls()
    one, two, three = (Script(site, at=at) for at in range(3))
    assert one.begin().returncode == 0
    assert one.ask("tend").returncode == 0
    one.checkpoint(5)
    one.says("stopped", "asked to stop by USR2")
    assert one.end().returncode == 0
    assert two.begin().returncode == 0  # no verdict is missing, and Slurm's order says the rest
    two.says("environment", "n1: 7 GPUs, 8 wanted", nodes=("n1",))
    assert two.ask("rescue", 1).returncode == 3
    assert Script(site, "evaluate").begin().returncode == 75  # too early: an edge was dropped
    assert three.begin().returncode == 0  # on a node that is bad by now, and cannot be left
    three.says("stopped", "asked to stop by USR2")
    last = three.end()
    assert last.returncode == 75
    assert f"resume {shown(site.run.root)}" in last.stderr
    three.checkpoint(20)
    three.says("complete")
    assert three.end().returncode == 0
    assert clock.slept < 30
    assert site.calls() == before
