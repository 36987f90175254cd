"""What follows from how attempts ended: the rules that keep a chain alive, and those that end it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.run.decision import Attempt, after_attempt, may_begin

# An attempt that trained from step 100 to 200 and was warned of its time limit.
SEGMENT = Attempt("7", 0, "stopped", "asked to stop by USR2", before=100, after=200, nodes=2, seconds=3600)
CRASH = replace(SEGMENT, verdict="crash", reason="rank 3: ValueError", after=100)


def after(last: Attempt, *past: Attempt, stage: str = "pretrain", **changes: bool):
    known = {"stop": False, "next_queued": False, "may_requeue": True} | changes
    return after_attempt(last, past, stage=stage, **known)


def begin(*past: Attempt, complete: bool = False, stop: bool = False, **changes: float):
    return may_begin(past, complete=complete, stop=stop, **changes)


def test_segment_whose_time_ran_out_leaves_the_rest_to_the_next_one() -> None:
    decision = after(SEGMENT, next_queued=True)
    assert (decision.action, decision.code) == ("end", 0)


def test_last_segment_requeues_itself_while_it_makes_progress() -> None:
    assert after(SEGMENT).action == "requeue"
    assert after(SEGMENT, SEGMENT, replace(SEGMENT, after=100)).action == "requeue"


def test_where_a_node_may_not_requeue_the_job_says_that_nothing_goes_on() -> None:
    decision = after(SEGMENT, may_requeue=False)
    assert (decision.action, decision.code) == ("end", 75)


def test_complete_ends_with_0_and_leaves_the_rest_in_peace() -> None:
    decision = after(replace(SEGMENT, verdict="complete", reason=""))
    assert (decision.action, decision.code, decision.cancel_rest) == ("end", 0, False)


@pytest.mark.parametrize(("verdict", "code"), [("config", 2), ("storage", 4), ("diverged", 5)])
def test_what_another_attempt_cannot_change_ends_the_chain_at_once(verdict: str, code: int) -> None:
    last = replace(SEGMENT, verdict=verdict, reason="said why")
    decision = after(last, next_queued=True)
    assert (decision.action, decision.code, decision.cancel_rest) == ("end", code, True)
    assert begin(last).code == code
    assert "said why" in begin(last).reason


@pytest.mark.parametrize("verdict", ["crash", "hang", "environment", "lost"])
def test_what_may_heal_is_tried_again(verdict: str) -> None:
    last = replace(SEGMENT, verdict=verdict)
    assert after(last).action == "requeue"
    assert begin(last).action == "go"


def test_a_crash_leaves_a_queued_segment_to_try_again_and_its_own_code_behind() -> None:
    decision = after(CRASH, next_queued=True)
    assert (decision.action, decision.code, decision.cancel_rest) == ("end", 1, False)


def test_two_attempts_without_a_new_step_end_the_chain_with_both_reasons() -> None:
    other = replace(CRASH, number=1, verdict="environment", reason="n2: no GPU")
    decision = after(other, CRASH, next_queued=True)
    assert (decision.code, decision.cancel_rest) == (6, True)
    assert "rank 3: ValueError" in decision.reason
    assert "n2: no GPU" in decision.reason
    assert begin(CRASH, other).code == 6


def test_a_new_step_in_between_sets_the_count_back() -> None:
    assert after(CRASH, CRASH, SEGMENT).action == "requeue"
    assert begin(CRASH, SEGMENT, CRASH).action == "go"


def test_preemption_is_nobodys_fault_however_often_it_comes() -> None:
    preempted = replace(SEGMENT, after=100, preempted=True)
    assert after(preempted, preempted, preempted).action == "requeue"
    assert begin(CRASH, preempted, preempted).action == "go"
    assert begin(CRASH, preempted, replace(CRASH, number=2)).code == 6


def test_a_time_limit_too_short_for_one_step_is_not_tried_for_ever() -> None:
    short = replace(SEGMENT, after=100)
    assert after(short).action == "requeue"
    assert after(short, short).code == 6


def test_out_of_memory_is_tried_once_more_even_if_steps_were_made() -> None:
    memory = replace(SEGMENT, verdict="out_of_memory", reason="oom_kill")
    assert after(memory).action == "requeue"
    assert after(memory, memory).code == 6


def test_a_persons_stop_ends_the_chain_before_and_after() -> None:
    assert (begin(stop=True).action, begin(stop=True).code, begin(stop=True).cancel_rest) == ("end", 75, True)
    decision = after(SEGMENT, stop=True, next_queued=True)
    assert (decision.action, decision.code, decision.cancel_rest) == ("end", 75, True)


def test_complete_work_is_skipped_even_after_a_stop() -> None:
    assert begin(complete=True, stop=True).action == "skip"


def test_a_cap_on_gpu_hours_ends_the_chain() -> None:
    decision = begin(SEGMENT, gpu_hours=16.0, most_gpu_hours=16.0)
    assert (decision.action, decision.code) == ("end", 75)
    assert "16.0 GPU-hours" in decision.reason
    assert begin(SEGMENT, gpu_hours=15.9, most_gpu_hours=16.0).action == "go"


def test_other_stages_are_tried_again_only_where_a_machine_was_to_blame() -> None:
    assert after(CRASH, stage="evaluate").action == "end"
    assert after(replace(CRASH, verdict="stopped"), stage="tokenize").action == "end"
    assert after(replace(CRASH, verdict="environment"), stage="tokenize").action == "requeue"
    assert after(replace(CRASH, verdict="stopped", preempted=True), stage="inference").action == "requeue"
