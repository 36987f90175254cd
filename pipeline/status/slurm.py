"""The Jobs of a Run as Slurm sees them, and as their own verdicts tell where Slurm has forgotten them."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pipeline.errors import NotReadyError, UserError
from pipeline.run.attempts import read_attempt
from pipeline.run.decision import FINAL
from pipeline.run.folder import Run
from pipeline.run.job_ledger import read_ledger
from pipeline.run.records import BeginRecord, JobRecord, VerdictRecord
from pipeline.run.verdict import COMPLETE, STOPPED, WARNED_EARLY
from pipeline.slurm.arrays import words
from pipeline.slurm.bad_nodes import BadNode, bad_nodes_of
from pipeline.slurm.commands import Slurm
from pipeline.slurm.errors import SlurmError
from pipeline.slurm.jobs import SlurmJob, unknown
from pipeline.slurm.priority import Priority
from pipeline.submit.queue import QueuedJob, RunJobs
from pipeline.submit.run_folder import read_cluster

Record = dict[str, Any]

RUNNING = ("running", "completing", "suspended")
WAITING = ("pending", "requeued", "requeue_hold")
MOST_ADVICE = 20  # bad nodes that other users name
MOST_PRIORITIES = 20
FORGOTTEN = "Slurm no longer knows this job"
LOG = re.compile(r"(?P<stage>[a-z_]+)-(?P<job_id>[0-9]+(?:_[0-9]+)?)\.(?P<attempt>\d+)\.log")

# What an attempt was warned of, as its host wrote it down.
WARNED = {
    "time limit": "saved and left before its time limit",
    WARNED_EARLY: "saved and made way before its time was up",
}


@dataclass(frozen=True)
class Answer:
    """What is known of one Job: a state of `status`, its reason in plain words, and its last attempt."""

    state: str
    reason: str
    attempt: int | None
    log: str | None
    started: float | None
    ended: float | None
    nodes: str = ""
    start: str | None = None  # when a Job that waits is expected to start, in Slurm's words
    time_left: int | None = None  # seconds until the time limit of one that runs
    waits_for: str = ""  # Slurm's own word for it


@dataclass(frozen=True)
class Queue:
    """What decides when Jobs that wait will start, and where none of them will."""

    priorities: dict[str, Priority] = field(default_factory=dict)  # by job id
    fair_share: dict[str, float] = field(default_factory=dict)  # by account
    bad_nodes: list[BadNode] = field(default_factory=list)

    def to_json(self) -> Record:
        return asdict(self)


@dataclass(frozen=True)
class Last:
    """The newest attempt of a Job, by its log, and what it has left."""

    attempt: int
    log: str  # inside the Run
    begin: BeginRecord | None
    verdict: VerdictRecord | None


def last_attempts(run: Run) -> dict[tuple[str, str], Last]:
    """Return the newest attempt of each Stage and Job; by one look at the folder, which may be far away."""
    newest: dict[tuple[str, str], int] = {}
    for path in run.logs.glob("*.log"):
        if match := LOG.fullmatch(path.name):
            key = match["stage"], match["job_id"]
            newest[key] = max(newest.get(key, 0), int(match["attempt"]))
    found = {}
    for (stage, job_id), attempt in newest.items():
        log = str(run.log(stage, job_id, attempt).relative_to(run.root))
        records = read_attempt(run, job_id, attempt)
        found[stage, job_id] = Last(attempt, log, records.begin, records.verdict)
    return found


def ask_slurm(run: Run, lasts: dict[tuple[str, str], Last]) -> tuple[list[QueuedJob], str]:
    """Return the Run's Jobs with what Slurm says of each, and where that was read.

    One that is known to have ended is not asked about.
    """
    records = read_ledger(run)
    try:
        jobs = RunJobs(run, cluster := read_cluster(run), cluster.slurm())
        if not cluster.nodes_may_submit and os.environ.get("SLURM_JOB_ID"):  # the last Job writes the report
            raise NotReadyError("nodes may not call Slurm's commands here")
        found = jobs.look(keep=False)
    except UserError as error:  # of the cluster file, or no answer
        silent = f"{error.words[0]} does not answer: {error.answer}" if isinstance(error, SlurmError) else str(error)
        why = silent.splitlines()[0]
        told = [QueuedJob(r, unknown(r.job_id, why, answered=r.closed)) for r in records if r.job_id]
        return told, f"jobs/ and verdicts; Slurm cannot be asked ({why})"
    found = _recall(jobs.slurm, found, lasts)
    if short := [queued.job_id for queued in found if queued.job.lacks_nodes]:
        with suppress(SlurmError):
            kept_off = jobs.slurm.excluded(short)
            found = [replace(q, job=replace(q.job, excluded=kept_off.get(q.job_id, ""))) for q in found]
    sources = sorted({queued.job.source if queued.job.source != "none" else "verdicts" for queued in found})
    looked = {queued.job_id for queued in found}
    ended = [
        QueuedJob(r, unknown(r.job_id, FORGOTTEN)) for r in records if r.closed and r.job_id and r.job_id not in looked
    ]
    told = sorted((q for q in (*ended, *found) if q.record.job_id), key=lambda queued: queued.record.number)
    return told, f"Slurm ({', '.join(sources)})" if sources else "Slurm"


def _recall(slurm: Slurm, found: list[QueuedJob], lasts: dict[tuple[str, str], Last]) -> list[QueuedJob]:
    """Ask accounting about the Jobs that Slurm has forgotten and that left no word themselves: one call for all."""
    silent = [q.job_id for q in found if q.record.job_id and q.job.forgotten and not _settled(q.record, lasts)]
    told = slurm.recall(silent)
    return [
        replace(queued, job=job) if (job := told.get(queued.job_id)) and _is_its_own(queued.record, job) else queued
        for queued in found
    ]


def _is_its_own(record: JobRecord, job: SlurmJob) -> bool:
    """Tell whether what accounting has under a Job's id is that Job: ids are given again."""
    known = ((record.user, job.user), (record.name, job.name))
    return not any(ours and theirs and ours != theirs for ours, theirs in known)


def _settled(record: JobRecord, lasts: dict[tuple[str, str], Last]) -> bool:
    """Tell whether the Job itself has left word of how it ended."""
    ids = [str(record.job_id)] if record.tasks == 1 else [f"{record.job_id}_{task}" for task in range(record.tasks)]
    return all((last := lasts.get((record.stage, job_id))) is not None and last.verdict for job_id in ids)


def ask_queue(run: Run, waiting: list[str]) -> Queue:
    """Ask for the priority of Jobs that wait, and for what it hangs on, as far as Slurm keeps it; read bad nodes."""
    try:
        cluster = read_cluster(run)
    except UserError:
        return Queue()
    slurm, priorities, shares = cluster.slurm(), {}, {}
    with suppress(SlurmError):  # without the plugin for it, sprio says no more than that
        priorities = slurm.priorities(waiting[:MOST_PRIORITIES])
        if any(priority.parts["fair share"] for priority in priorities.values()):
            shares = slurm.fair_share()
            account = cluster.sbatch_options("pretrain").get("account", "")
            shares = {account: shares[account]} if account in shares else shares
    listed = bad_nodes_of(run, cluster)
    told = [*listed.read().values(), *listed.advice()[:MOST_ADVICE]]
    return Queue(priorities, shares, sorted(told, key=lambda node: (node.name, node.by)))


def answer(queued: QueuedJob, lasts: dict[tuple[str, str], Last]) -> Answer:
    """Tell how one Job of the ledger is doing."""
    record, job, job_id, stage = queued.record, queued.job, queued.job_id, queued.record.stage
    if record.tasks > 1:
        return _answer_of_array(stage, job_id, record.tasks, job, lasts)
    last = lasts.get((stage, job_id))
    attempt, log, verdict = (last.attempt, last.log, last.verdict) if last else (None, None, None)
    begin = last.begin if last else None
    state, reason = _state(job, verdict)
    started = begin.time if begin and state != "pending" else None
    ended = verdict.time if verdict and state not in ("running", "pending") else None
    return Answer(
        state, reason, attempt, log, started, ended, job.nodes, job.start,
        job.time_left if state == "running" else None, job.reason if job.state in WAITING else "",
    )  # fmt: skip


def _answer_of_array(stage: str, job_id: str, tasks: int, job: SlurmJob, lasts: dict[tuple[str, str], Last]) -> Answer:
    """Tell how all tasks of a Job array are doing: in one line, with the reason of one that failed."""
    found = [last for task in range(tasks) if (last := lasts.get((stage, f"{job_id}_{task}")))]
    complete = [last for last in found if last.verdict and last.verdict.verdict == COMPLETE]
    failed = [last for last in found if last.verdict and last not in complete]
    shown = failed[0] if failed else found[-1] if found else None
    state, reason = _state(job, shown.verdict if failed and shown else None)
    if job.state not in (*RUNNING, *WAITING):
        # One that had nothing to do has left no verdict.
        complete_enough = not failed and (len(complete) == tasks or job.success)
        state = "completed" if complete_enough else state
    told = words(tasks, len(complete), job.tasks)
    reason = "" if state == "completed" else f"{told}; {reason}" if reason else told
    began = [last.verdict.began for last in found if last.verdict]
    ends = [last.verdict.time for last in found if last.verdict]
    return Answer(
        state, reason, None, shown.log if shown else None, min((time for time in began if time), default=None),
        max((time for time in ends if time), default=None) if state not in ("running", "pending") else None,
        start=job.start, waits_for=job.reason if job.state in WAITING else "",
    )  # fmt: skip


def _state(job: SlurmJob, verdict: VerdictRecord | None) -> tuple[str, str]:
    kind, why = (verdict.verdict, verdict.reason) if verdict else (None, "")
    if job.state in RUNNING:
        return "running", ""
    if job.state in WAITING:
        return "pending", job.explain()
    if kind == COMPLETE:
        return "completed", ""
    if not job.answered and kind not in FINAL:
        ended = f"; its last attempt ended with {kind}" if kind else ""
        return "pending", f"not known: {job.reason}{ended}"
    if verdict and kind == STOPPED:
        return "stopped", WARNED.get(str(verdict.warned), why)
    if kind is not None:
        return "failed", f"{kind}: {why}" if why else str(kind)
    if job.state.startswith("unknown"):
        return "stopped", f"{FORGOTTEN}, and it left no verdict"
    if job.success:
        return "completed", "had nothing to do"
    return "failed" if job.state != "cancelled" else "stopped", job.explain() or job.state
