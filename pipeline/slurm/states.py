"""Slurm's states and reasons in plain words."""

from __future__ import annotations

import re
from typing import NamedTuple

from pipeline.slurm.node_lists import few_nodes

# One table: a Job of any other state than those that ended may run, or come to run, whether we know its name or not.
LIVE = frozenset("pending running completing suspended requeued requeue_hold".split())
ENDED = frozenset("completed failed cancelled timeout node_fail preempted out_of_memory boot_fail deadline".split())
STATES = LIVE | ENDED

# Other spellings: squeue's short codes, states that last seconds, states of single sites.
OTHER = {
    "PD": "pending", "R": "running", "CG": "completing", "CD": "completed", "F": "failed", "CA": "cancelled",
    "TO": "timeout", "NF": "node_fail", "PR": "preempted", "OOM": "out_of_memory", "RQ": "requeued",
    "RH": "requeue_hold", "BF": "boot_fail", "DL": "deadline", "S": "suspended", "ST": "suspended",
    "CF": "pending", "CONFIGURING": "pending", "RS": "running", "RESIZING": "running", "SI": "running",
    "SIGNALING": "running", "STOPPED": "suspended", "STAGE_OUT": "completing", "SO": "completing",
    "REQUEUE_FED": "requeued", "RF": "requeued", "SPECIAL_EXIT": "requeue_hold", "SE": "requeue_hold",
    "RESV_DEL_HOLD": "requeue_hold", "RD": "requeue_hold", "EXPEDITING": "requeued",
}  # fmt: skip


def normal_state(text: str) -> str:
    """Return one of STATES, or `unknown(TEXT)`; `CANCELLED by 1000`, `RH` and lists of states are understood."""
    words = [word for word in re.split(r"[\s,+\[\]\"']+", text.strip()) if word]
    if not words:
        return "unknown()"
    if "COMPLETING" in words:  # a flag beside the state that it will have
        return "completing"
    first = words[0].upper()
    if first.lower() in STATES:
        return first.lower()
    return OTHER.get(first, f"unknown({text.strip()[:40]})")


class Reason(NamedTuple):
    """What Slurm's word means, and what a person can do; `stuck`: it does not go away by itself."""

    words: str
    stuck: bool = False


# The first whose name the reason begins with. Slurm has over a hundred; the rest is shown as it is.
REASONS = {
    "None": Reason("about to be looked at by the scheduler"),
    "Priority": Reason("waits for Jobs of higher priority; nothing to do"),
    "Resources": Reason("is next, and waits until enough nodes are free; nothing to do"),
    "DependencyNeverSatisfied": Reason(
        "blocked for ever: a Job that it needs did not complete; mend that one's cause, then cancel and resume the Run",
        True,
    ),
    "Dependency": Reason("waits for a Job before it in the chain"),
    "BeginTime": Reason("waits for its time to begin; a Job that was requeued is held for two minutes"),
    "JobHeldUser": Reason("held by its owner; release it: scontrol release JOB", True),
    "JobHeldAdmin": Reason("held by an administrator; ask them why", True),
    "launch failed requeued held": Reason(
        "held: a node could not start it; ask an administrator about that node, then: scontrol release JOB",
        True,
    ),
    "job requeued in held state": Reason(
        "requeued and held, by its owner or an administrator; release it: scontrol release JOB", True
    ),
    "launch failure limit exceeded": Reason(
        "held: too many nodes could not start it; ask an administrator about them, then: scontrol release JOB", True
    ),
    "user env retrieval failed": Reason(
        "held: its node could not read your environment; then: scontrol release JOB", True
    ),
    "JobHoldMaxRequeue": Reason("held after too many requeues; find the cause, then: scontrol release JOB", True),
    "PartitionTimeLimit": Reason(
        "asks for more time than the partition allows, so it would wait for ever; lower the stage's time", True
    ),
    "PartitionNodeLimit": Reason("asks for more nodes than the partition allows; lower pretrain.nodes", True),
    "PartitionConfig": Reason("asks for what the partition does not allow; see: scontrol show partition", True),
    "PartitionDown": Reason("the partition takes no Jobs to start now; ask an administrator, or choose another"),
    "PartitionInactive": Reason("the partition takes no Jobs; choose another", True),
    "ReqNodeNotAvail": Reason(
        "nodes that it needs are down, drained or reserved (maintenance?); see: sinfo -R, scontrol show reservation"
    ),
    "Nodes required for job are DOWN": Reason("nodes that it needs are down, drained or reserved; see: sinfo -R"),
    "NodeDown": Reason("a node that it needs is down; see: sinfo -R"),
    "BadConstraints": Reason("no node has what it asks for; mend constraint, gres or mem below sbatch", True),
    "Licenses": Reason("waits for a licence"),
    "ReservationDeleted": Reason("its reservation was deleted; give another, or none", True),
    "Reservation": Reason("waits for its reservation to begin"),
    "InvalidAccount": Reason("its account is not valid; mend account below sbatch", True),
    "InvalidQOS": Reason("its QOS is not valid; mend qos below sbatch", True),
    "AccountNotAllowed": Reason("its account may not use this partition; mend account or partition below sbatch", True),
    "QOSNotAllowed": Reason("its QOS may not be used there; mend qos or partition below sbatch", True),
    "QOSUsageThreshold": Reason("the QOS's usage is too high; wait for it to decay, or use another qos"),
    "JobArrayTaskLimit": Reason("waits for other tasks of its array"),
    "Prolog": Reason("its nodes are being prepared"),
    "Cleaning": Reason("being cleaned up after its last attempt"),
    "SchedDefer": Reason("the scheduler puts Jobs off; nothing to do"),
    "SystemFailure": Reason("Slurm itself failed; ask an administrator", True),
    "JobLaunchFailure": Reason("a node could not start it; ask an administrator about that node"),
    "NonZeroExitCode": Reason("its script ended with an error; see its log"),
    "RaisedSignal": Reason("its script was ended by a signal; see its log"),
    "TimeLimit": Reason("ran into its time limit"),
    "OutOfMemory": Reason("used more memory than it had asked for; raise mem, or lower micro_batch_size"),
}
LACKS_NODES = ("ReqNodeNotAvail", "Nodes required for job are DOWN", "NodeDown", "BadConstraints")
UNAVAILABLE = re.compile(r"UnavailableNodes:\s*([^\s)]+)")
PER_JOB = re.compile(r"(QOS|Assoc|Max|Grp)\w*PerJob\w*|(QOS|Assoc)Max\w*(Wall|MinutesPerJob)\w*|QOSMin\w*")
HELD = re.compile(r"\bheld\b|\bin held state\b")  # "job requeued in held state", and what a later Slurm will call it
LIMIT = re.compile(r"(QOS|Assoc|Max|Grp)[A-Z]")


def lacks_nodes(reason: str) -> bool:
    """Tell whether a Job waits because too few of the nodes that it may have are there, and not for its turn."""
    return _plain(reason).startswith(LACKS_NODES)


def _plain(reason: str) -> str:
    text = reason.strip("() \t")
    return text.replace("_", " ") if " " not in text else text


def explain_reason(reason: str) -> Reason:
    """Say in plain words what a Job waits for."""
    text = _plain(reason)
    for name, meaning in REASONS.items():
        if text.startswith(name):
            nodes = UNAVAILABLE.search(text)
            return meaning._replace(words=f"{meaning.words} (now: {few_nodes(nodes[1])})") if nodes else meaning
    if PER_JOB.match(text):
        return Reason(
            f"asks for more than a limit on single Jobs allows ({text}), so it would wait for ever; "
            "lower nodes or time, or use another qos or account",
            True,
        )
    if LIMIT.match(text):
        return Reason(f"a limit of the QOS or account is reached ({text}); it starts when other Jobs have ended")
    if HELD.search(text):
        return Reason(f"held ({text[:100]}); find the cause, then: scontrol release JOB", True)
    return Reason(f"Slurm says {text[:200]}") if text else Reason("Slurm gives no reason")
