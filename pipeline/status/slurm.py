"""The Jobs of a Run as Slurm sees them, and as their own verdicts tell where Slurm has forgotten them."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pipeline.errors import UserError
from pipeline.run.decision import FINAL
from pipeline.run.folder import Run
from pipeline.run.records import number, read_record, whole
from pipeline.run.verdict import COMPLETE, STOPPED, WARNED_EARLY
from pipeline.slurm.arrays import words
from pipeline.slurm.bad_nodes import BadNode, bad_nodes_of
from pipeline.slurm.errors import SlurmError
from pipeline.slurm.jobs import SlurmJob
from pipeline.slurm.priority import Priority
from pipeline.submit.run_folder import read_cluster

Record = dict[str, Any]

RUNNING = ("running", "completing", "suspended")
WAITING = ("pending", "requeued", "requeue_hold")
MOST_PRIORITIES = 20
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
    """The newest attempt of a Job, by its log, and its verdict: an empty one where it has left none."""

    attempt: int
    log: str  # inside the Run
    verdict: Record


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
        found[stage, job_id] = Last(attempt, log, read_record(run.verdict(job_id, attempt)))
    return found


def ask_slurm(run: Run, record: Record, lasts: dict[tuple[str, str], Last]) -> tuple[dict[str, SlurmJob], str]:
    """Return the Run's Jobs by id, and where that was read; none where the scheduler does not answer."""
    entries = [job for job in record.get("jobs", []) if isinstance(job, dict) and job.get("job_id")]
    ids = [str(job["job_id"]) for job in entries]
    settled = {job_id for (_, job_id), last in lasts.items() if last.verdict}
    for entry in entries:
        tasks = whole(entry.get("tasks")) or 1
        if tasks > 1 and all(f"{entry['job_id']}_{task}" in settled for task in range(tasks)):
            settled.add(str(entry["job_id"]))
    try:
        slurm = read_cluster(run).slurm()
        jobs = slurm.jobs(ids, settled=settled)
        if short := [job_id for job_id, job in jobs.items() if job.lacks_nodes]:
            with suppress(SlurmError):
                jobs |= {key: replace(jobs[key], excluded=nodes) for key, nodes in slurm.excluded(short).items()}
    except UserError as error:  # of the cluster file
        return {}, f"jobs.json and verdicts; Slurm cannot be asked ({str(error).splitlines()[0]})"
    if silent := next((job for job in jobs.values() if not job.answered), None):
        return jobs, f"jobs.json and verdicts; {silent.reason}"
    sources = sorted({job.source if job.source != "none" else "verdicts" for job in jobs.values()})
    return jobs, f"Slurm ({', '.join(sources)})" if sources else "Slurm"


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
    return Queue(priorities, shares, sorted(bad_nodes_of(run, cluster).read().values(), key=lambda node: node.name))


def answer(run: Run, entry: Record, job: SlurmJob | None, lasts: dict[tuple[str, str], Last]) -> Answer:
    """Tell how one Job of jobs.json is doing."""
    job_id, stage = str(entry.get("job_id")), str(entry.get("stage"))
    if (tasks := whole(entry.get("tasks")) or 1) > 1:
        return _answer_of_array(run, stage, job_id, tasks, job, lasts)
    last = lasts.get((stage, job_id))
    attempt, log, verdict = (last.attempt, last.log, last.verdict) if last else (None, None, {})
    began = read_record(run.beginning(job_id, attempt)) if attempt is not None else {}
    started, ended = number(began.get("time")), number(verdict.get("time"))
    state, reason = _state(job, verdict)
    if state in ("running", "pending"):
        ended = None
    if job is None:
        return Answer(state, reason, attempt, log, started if state != "pending" else None, ended)
    return Answer(
        state, reason, attempt, log, started if state != "pending" else None, ended, job.nodes, job.start,
        job.time_left if state == "running" else None, job.reason if job.state in WAITING else "",
    )  # fmt: skip


def _answer_of_array(
    run: Run, stage: str, job_id: str, tasks: int, job: SlurmJob | None, lasts: dict[tuple[str, str], Last]
) -> Answer:
    """Tell how all tasks of a Job array are doing: in one line, with the reason of one that failed."""
    found = [last for task in range(tasks) if (last := lasts.get((stage, f"{job_id}_{task}")))]
    complete = [last for last in found if last.verdict.get("verdict") == COMPLETE]
    failed = [last for last in found if last.verdict and last not in complete]
    shown = failed[0] if failed else found[-1] if found else None
    state, reason = _state(job, shown.verdict if failed and shown else {})
    if job is None or job.state not in (*RUNNING, *WAITING):
        # One that had nothing to do has left no verdict.
        complete_enough = not failed and (len(complete) == tasks or (job is not None and job.success))
        state = "completed" if complete_enough else state
    told = words(tasks, len(complete), job.tasks if job else {})
    reason = "" if state == "completed" else f"{told}; {reason}" if reason else told
    began = [number(last.verdict.get("began")) for last in found]
    ends = [number(last.verdict.get("time")) for last in found]
    return Answer(
        state, reason, None, shown.log if shown else None, min((time for time in began if time), default=None),
        max((time for time in ends if time), default=None) if state not in ("running", "pending") else None,
        start=job.start if job else None, waits_for=job.reason if job and job.state in WAITING else "",
    )  # fmt: skip


def _state(job: SlurmJob | None, verdict: Record) -> tuple[str, str]:
    kind, why = verdict.get("verdict"), str(verdict.get("reason") or "")
    if job is not None and job.state in RUNNING:
        return "running", ""
    if job is not None and job.state in WAITING:
        return "pending", job.explain()
    if kind == COMPLETE:
        return "completed", ""
    if job is not None and not job.answered and kind not in FINAL:
        ended = f"; its last attempt ended with {kind}" if kind else ""
        return "pending", f"not known: {job.reason}{ended}"
    if kind == STOPPED:
        return "stopped", WARNED.get(str(verdict.get("warned")), why)
    if kind is not None:
        return "failed", f"{kind}: {why}" if why else str(kind)
    if job is None or job.state.startswith("unknown"):
        return "stopped", "Slurm no longer knows this job, and it left no verdict"
    if job.success:
        return "completed", "had nothing to do"
    return "failed" if job.state != "cancelled" else "stopped", job.explain() or job.state
