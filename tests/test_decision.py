"""What follows from how attempts ended: the rules that keep a chain alive, and those that end it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.run.decision import (
    MOST_FAILURES,
    MOST_PREEMPTIONS,
    Attempt,
    Decision,
    after_attempt,
    may_begin,
)

# An attempt that trained from step 100 to 200 and was warned of its time limit.
SEGMENT = Attempt("7", 0, "stopped", "asked to stop by USR2", before=100, after=200, nodes=2, seconds=3600)
CRASH = replace(SEGMENT, verdict="crash", reason="rank 3: ValueError", after=100)


def after(last: Attempt, *past: Attempt, stage: str = "pretrain", stop: bool = False, tries: int = 2) -> Decision:
    return after_attempt(last, past, stage=stage, stop=stop, tries=tries)


def begin(*past: Attempt, complete: bool = False, stop: bool = False, **changes: float):
    return may_begin(past, complete=complete, stop=stop, **changes)


def test_segment_whose_time_ran_out_goes_on_and_is_no_failure() -> None:
    decision = after(SEGMENT)
    assert (decision.action, decision.code, decision.delay) == ("go_on", 0, 0)
    assert after(SEGMENT, SEGMENT, replace(SEGMENT, after=100)).action == "go_on"


def test_complete_ends_with_0_and_leaves_the_rest_in_peace() -> None:
    decision = after(replace(SEGMENT, verdict="complete", reason=""))
    assert (decision.action, decision.code, decision.cancel_rest) == ("end", 0, False)


@pytest.mark.parametrize(("verdict", "code"), [("config", 2), ("storage", 4), ("diverged", 5)])
def test_what_another_attempt_cannot_change_ends_the_chain_at_once(verdict: str, code: int) -> None:
    last = replace(SEGMENT, verdict=verdict, reason="said why")
    decision = after(last)
    assert (decision.action, decision.code, decision.cancel_rest) == ("end", code, True)
    assert begin(last).code == code
    assert "said why" in begin(last).reason


@pytest.mark.parametrize("verdict", ["crash", "hang", "environment", "lost"])
def test_what_may_heal_is_tried_again(verdict: str) -> None:
    last = replace(SEGMENT, verdict=verdict)
    assert after(last).action == "go_on"
    assert begin(last).action == "go"


def test_a_crash_goes_on_and_leaves_its_own_code_behind() -> None:
    decision = after(CRASH)
    assert (decision.action, decision.code, decision.cancel_rest) == ("go_on", 1, False)


def test_the_same_cause_twice_without_a_new_step_ends_the_chain_with_both_reasons() -> None:
    again = replace(CRASH, job_id="8", reason="rank 11: ValueError")
    decision = after(again, CRASH)
    assert (decision.action, decision.code, decision.cancel_rest) == ("end", 6, True)
    assert "7.0: crash, rank 3: ValueError" in decision.reason
    assert "8.0: crash, rank 11: ValueError" in decision.reason
    assert begin(CRASH, again).code == 6


def test_two_random_failures_do_not_end_a_healthy_chain() -> None:
    lost = replace(CRASH, verdict="lost", reason="no process was left to say how it ended; it ran on n1, n2")
    other = replace(CRASH, verdict="environment", reason="n2: 2 uncorrected ECC errors", blamed=["n2"], sure=True)
    for first, second in ((CRASH, other), (lost, lost), (other, other), (other, lost), (lost, CRASH)):
        assert after(second, first).action == "go_on"
        assert begin(first, second).action == "go"


def test_the_same_software_cause_counts_across_a_lost_node() -> None:
    lost = replace(CRASH, verdict="lost", reason="no process was left")
    assert after(CRASH, CRASH, lost).code == 6


def test_attempts_of_any_cause_have_a_bound_and_pauses_that_double() -> None:
    lost = replace(CRASH, verdict="lost", reason="no process was left")
    row = [lost] * (MOST_FAILURES - 1)
    assert [after(lost, *row[:count]).delay for count in range(7)] == [60, 120, 240, 480, 960, 1800, 1800]
    assert after(row[0], *row[1:]).action == "go_on"
    decision = after(lost, *row)
    assert (decision.action, decision.code, decision.cancel_rest) == ("end", 6, True)
    assert begin(*row, lost).code == 6
    assert begin(*row, SEGMENT, lost).action == "go"


@pytest.mark.parametrize(
    ("verdict", "reason"),
    [
        ("hang", "hang: rank 3 on n1 (process 7), after step 4: a step took longer than 300 s; silent since: stopped"),
        ("crash", "rank 3 on n1 (process 7) is gone: it was killed, or ended by itself; after step 4"),
        ("crash", "rank 3: AcceleratorError: CUDA error: uncorrectable ECC error encountered"),
        ("crash", "rank 3: DistBackendError: NCCL error: remote process exited or there was a network error"),
    ],
)
def test_words_that_a_machine_may_be_behind_may_come_twice_as_often(verdict: str, reason: str) -> None:
    last = replace(CRASH, verdict=verdict, reason=reason)
    assert after(last, last, last).action == "go_on"
    assert after(last, last, last, last).code == 6


def test_blame_that_the_next_attempt_elsewhere_contradicts_does_not_count() -> None:
    """A fault of the environment blames node after node; the same words on the second one end the chain."""
    on = [
        replace(CRASH, verdict="environment", reason=f"n{n}: no GPU", blamed=[f"n{n}"], names=[f"n{n}"]) for n in (1, 2)
    ]
    assert begin(on[0]).action == "go"
    assert begin(*on).code == 6
    sure = [replace(attempt, sure=True) for attempt in on]  # other nodes of the same attempts were fine
    assert begin(*sure).action == "go"


def test_the_key_of_the_cluster_file_counts_the_same_cause() -> None:
    assert after(CRASH, tries=1).code == 6
    assert after(CRASH, CRASH, tries=3).action == "go_on"
    assert after(CRASH, CRASH, CRASH, tries=3).code == 6
    assert after(CRASH, *[CRASH] * 18, tries=20).action == "go_on"


def test_a_new_step_in_between_sets_the_count_back() -> None:
    assert after(CRASH, CRASH, SEGMENT).action == "go_on"
    assert begin(CRASH, SEGMENT, CRASH).action == "go"


def test_preemption_is_no_failure_and_has_a_bound_of_its_own() -> None:
    preempted = replace(SEGMENT, after=100, preempted=True)
    assert after(preempted, preempted, preempted).action == "go_on"
    assert after(preempted, preempted, preempted).delay == 0
    assert begin(CRASH, preempted, preempted).action == "go"
    assert begin(CRASH, preempted, replace(CRASH, number=2)).code == 6
    row = [preempted] * (MOST_PREEMPTIONS - 1)
    assert begin(*row).action == "go"
    assert (begin(*row, preempted).action, begin(*row, preempted).code) == ("end", 6)
    assert begin(*row, replace(preempted, after=101), preempted).action == "go"


def test_a_time_limit_too_short_for_one_step_is_not_tried_for_ever() -> None:
    short = replace(SEGMENT, after=100)
    assert after(short).action == "go_on"
    assert after(short, short).code == 6


def test_out_of_memory_is_tried_once_more_even_if_steps_were_made() -> None:
    memory = replace(SEGMENT, verdict="out_of_memory", reason="oom_kill")
    assert after(memory).action == "go_on"
    assert after(memory, memory).code == 6


def test_a_persons_stop_ends_the_chain_before_and_after() -> None:
    assert (begin(stop=True).action, begin(stop=True).code, begin(stop=True).cancel_rest) == ("end", 75, True)
    decision = after(SEGMENT, stop=True)
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
    assert after(replace(CRASH, verdict="environment"), stage="tokenize").action == "go_on"
    assert after(replace(CRASH, verdict="stopped", preempted=True), stage="inference").action == "go_on"
