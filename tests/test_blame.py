"""A fault that is the same everywhere is the environment's, never a node's."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.run.blame import KINDS, Blame, Fault, blame_of, blamed_nodes, review, standing, was_fine
from pipeline.run.decision import Attempt, may_begin

NO_CUDA = "torch.cuda.is_available() is False, but 8 are asked for"


def attempt(node: str, reason: str = NO_CUDA, *, blamed: bool = True, sure: bool = False, **changes: Any) -> Attempt:
    known = {"names": [node], "blamed": [node] if blamed else [], "sure": sure, "environment": "image a"}
    return Attempt("7", 0, "environment", f"{node}: {reason}", -1, -1, **(known | changes))


TRAINED = Attempt("6", 0, "stopped", "", -1, 100, names=["n9"], environment="image a")


def test_a_node_is_blamed_where_another_one_of_the_attempt_is_fine() -> None:
    faults = [Fault("n2", "gpu missing"), Fault("n5", "disk"), Fault("n2", "disk")]
    assert blamed_nodes(faults, ["n1", "n2", "n5", "n6"]) == ["n2", "n5"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_all_nodes_have_is_the_environments(kind: str) -> None:
    everywhere = [Fault(node, kind) for node in ("n1", "n2", "n3")]
    assert blamed_nodes(everywhere, ["n1", "n2", "n3"]) == []
    assert blamed_nodes(everywhere, ["n1", "n2", "n3"], fine_before=True) == []  # a driver that was changed everywhere
    assert blamed_nodes(everywhere[:1], ["n1", "n2", "n3"]) == ["n1"]


def test_what_most_nodes_have_is_the_environments_too() -> None:
    absent = [Fault(f"n{number}", "absent") for number in range(600)]  # a file system that was slow for a while
    assert blamed_nodes(absent, [f"n{number}" for number in range(1000)]) == []
    assert len(blamed_nodes(absent[:500], [f"n{number}" for number in range(1000)])) == 500


@pytest.mark.parametrize("kind", KINDS)
def test_a_single_node_is_compared_with_earlier_attempts(kind: str) -> None:
    assert blamed_nodes([Fault("n1", kind)], ["n1"]) == []
    assert blamed_nodes([Fault("n1", kind)], ["n1"], fine_before=True) == ["n1"]


@pytest.mark.parametrize("kind", ["", "ValueError", "exception", "registry"])
def test_only_what_is_a_nodes_own_by_nature_is_blamed(kind: str) -> None:
    assert blamed_nodes([Fault("n1", kind)], ["n1", "n2"], fine_before=True) == []


def test_a_node_that_was_not_looked_at_does_not_speak_for_the_others() -> None:
    assert blamed_nodes([Fault("n1", "gpu missing")], ["n1"]) == []  # n2 never arrived


def test_earlier_attempts_speak_for_the_same_interpreter_and_image_only() -> None:
    assert was_fine([TRAINED], "image a")
    assert not was_fine([TRAINED], "image b")
    assert not was_fine([attempt("n1")], "image a")


def report(*nodes: str, bad: str = "n1", kind: str = "gpu missing") -> dict[str, Any]:
    finding = {"level": "error", "node": bad, "kind": kind, "cause": NO_CUDA}
    return {"findings": [finding], "nodes": [{"node": node} for node in nodes]}


def test_a_cpu_build_of_torch_blames_no_node() -> None:
    """It was put on node after node, for a day each."""
    said = {"verdict": "environment", "reason": f"n1: {NO_CUDA}"}
    assert blame_of(said, report("n1"), [], "image a").nodes == []
    assert blame_of(said, report("n1"), [attempt("n3", blamed=False)], "image a").nodes == []
    assert blame_of(said, report("n1"), [TRAINED], "image b").nodes == []  # the interpreter was changed since
    assert blame_of(said, report("n1"), [TRAINED], "image a") == Blame(["n1"])


def test_blame_within_the_attempt_is_the_verdicts_and_stands() -> None:
    said = {"verdict": "environment", "reason": f"n1: {NO_CUDA}", "nodes": ["n1"]}
    assert blame_of(said, report("n1", "n2"), [], "") == Blame(["n1"], sure=True)
    assert blame_of(said | {"sure": False}, {}, [], "") == Blame(["n1"])


@pytest.mark.parametrize("record", [{}, {"findings": None}, {"findings": ["x", {}]}, {"nodes": [1, {}], "findings": [{"node": 1}]}])  # fmt: skip
def test_a_torn_report_blames_nobody(record: dict[str, Any]) -> None:
    assert blame_of({"verdict": "crash"}, record, [TRAINED], "image a").nodes == []


def test_the_next_attempt_elsewhere_takes_the_blame_back() -> None:
    first, second = attempt("n1"), attempt("n2")
    assert review(first, []) == (["n1"], [])
    assert review(second, [first]) == ([], ["n1"])
    assert standing([first, second]) == [[], []]
    assert may_begin([first], complete=False, stop=False).action == "go"
    ended = may_begin([first, second], complete=False, stop=False)
    assert (ended.action, ended.code) == ("end", 6)


def test_another_cause_or_the_same_node_takes_nothing_back() -> None:
    first = attempt("n1")
    assert review(attempt("n2", "its clock is 600 s ahead"), [first]) == (["n2"], [])
    assert review(attempt("n1"), [first]) == (["n1"], [])
    assert review(attempt("n2", names=[], blamed=False), [first]) == ([], [])  # where it ran is not known


def test_two_nodes_with_the_same_defect_are_both_bad_where_others_were_fine() -> None:
    first, second = attempt("n1", sure=True), attempt("n2", sure=True)
    assert review(second, [first]) == (["n2"], [])
    assert may_begin([first, second], complete=False, stop=False).action == "go"


def test_a_preemption_in_between_does_not_hide_the_contradiction() -> None:
    preempted = Attempt("7", 1, "stopped", "", -1, -1, preempted=True, names=["n3"])
    assert review(attempt("n2"), [attempt("n1"), preempted]) == ([], ["n1"])
