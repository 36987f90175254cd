"""Which nodes an attempt may blame. A wrong name costs a good node for a day, and the next one after it.

A fault is a node's own only by its kind, and only where something else was fine: another node of the same attempt, or
an earlier attempt with the same interpreter and image. What is the same everywhere is the environment's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # decision.py asks this module
    from pipeline.run.decision import Attempt

# The kinds of fault that a node has by itself. What is not here (an exception, a variable, a registry) blames nobody.
KINDS = {
    "absent": "said nothing, or got no further, while others went on",
    "gpu missing": "fewer GPUs than were asked for, or another driver",
    "gpu fault": "a GPU that is lost, has ECC errors, is slowed down by its hardware or held by a stranger",
    "infiniband": "devices or ports that are not there",
    "limits": "locked or shared memory that is too small",
    "disk": "a node-local disk that is full or read-only",
    "mount": "a file or folder that it does not see",
    "container": "no Pyxis, or no way to mount the image",
    "clock": "a clock that is wrong",
    "names": "host names that it resolves to nothing, or to itself",
    "route": "no way to rank 0",
    "slow": "links between its GPUs that are slower than the others'",
    "profile": "a variable that something on the node changes",
    "launch": "Slurm could not start a task there",
}


@dataclass(frozen=True)
class Fault:
    """Something that is wrong with one node, of one of KINDS."""

    node: str
    kind: str


@dataclass(frozen=True)
class Blame:
    """The nodes that an attempt blames. `sure`: others of the same attempt were looked at and are fine."""

    nodes: list[str] = field(default_factory=list)
    sure: bool = False


def blamed_nodes(faults: Iterable[Fault], looked_at: Collection[str], *, fine_before: bool = False) -> list[str]:
    """Return the nodes to blame, in the order in which they were found: never most of those that were looked at.

    `looked_at`: the nodes of this attempt that could have had the fault. `fine_before`: an earlier attempt with the
    same interpreter and image trained; it speaks for an attempt of a single node, which has nothing to compare with.
    """
    of_kind: dict[str, list[str]] = {}
    for fault in faults:
        if fault.kind in KINDS and fault.node not in of_kind.setdefault(fault.kind, []):
            of_kind[fault.kind].append(fault.node)
    blamed = []
    for nodes in of_kind.values():
        others = set(looked_at) - set(nodes)
        alone = not others and len(nodes) == 1
        if (fine_before and alone) or 0 < len(nodes) <= len(others):
            blamed += nodes
    return list(dict.fromkeys(blamed))


def was_fine(past: Iterable[Attempt], environment: str) -> bool:
    """Tell whether an earlier attempt trained with this interpreter and image, so that they can."""
    return any(attempt.after > attempt.before and attempt.environment == environment for attempt in past)


def blame_of(said: Mapping[str, Any], report: Mapping[str, Any], past: Sequence[Attempt], environment: str) -> Blame:
    """Return whom an attempt blames that ended as `said`: the verdict's record, with what preflight's report has found.

    What was compared within the attempt is in the verdict. An attempt of one node is compared with earlier ones.
    """
    if nodes := [str(name) for name in said.get("nodes") or []]:
        return Blame(nodes, sure=bool(said.get("sure", bool(report))))
    faults = [
        Fault(str(finding.get("node")), str(finding.get("kind")))
        for finding in report.get("findings") or []
        if isinstance(finding, dict) and finding.get("level") == "error" and finding.get("node")
    ]
    looked_at = [str(node.get("node")) for node in report.get("nodes") or [] if isinstance(node, dict)]
    return Blame(blamed_nodes(faults, looked_at, fine_before=was_fine(past, environment)))


def contradicts(attempt: Attempt, other: Attempt) -> bool:
    """Tell whether `other`, the attempt before or after, failed of the same cause on other nodes: then it is no node's.

    Not where the blame is sure: two nodes of a cluster may have the same defect.
    """
    if attempt.sure or attempt.key != other.key:
        return False
    places = {*other.names, *other.blamed}
    return bool(places) and not places & set(attempt.blamed)


def standing(attempts: Sequence[Attempt]) -> list[list[str]]:
    """Return for each attempt, oldest first, the nodes that it may still blame beside its neighbours."""
    result = []
    for position, attempt in enumerate(attempts):
        neighbours = [*attempts[max(0, position - 1) : position], *attempts[position + 1 : position + 2]]
        stands = attempt.blamed and not any(contradicts(attempt, other) for other in neighbours)
        result.append(list(attempt.blamed) if stands else [])
    return result


def review(last: Attempt, past: Sequence[Attempt]) -> tuple[list[str], list[str]]:
    """Return (the nodes that `last` may blame, those that earlier attempts blamed and that are to be taken back)."""
    before = [attempt for attempt in past if not attempt.preempted][-1:]
    blamed = standing([*before, last])
    withdrawn = [name for attempt, kept in zip(before, blamed, strict=False) for name in attempt.blamed if not kept]
    return blamed[-1], withdrawn
