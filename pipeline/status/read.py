"""How a Run is doing, told from its files and from the processes that they name."""

from __future__ import annotations

import socket
import time
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pipeline.config.schema import Config
from pipeline.errors import UserError
from pipeline.evaluation.release import released
from pipeline.hints import command
from pipeline.plan.jobs import STAGES
from pipeline.plan.sizes import tokens_per_step
from pipeline.run.attempts import all_attempts, read_attempt
from pipeline.run.complete import is_complete
from pipeline.run.folder import Run
from pipeline.run.goodput import Split, read_split
from pipeline.run.job_ledger import is_on_slurm
from pipeline.run.owner import is_alive
from pipeline.run.place import place_of
from pipeline.run.records import (
    JobRecord,
    Record,
    Score,
    number,
    read_compressors,
    read_config,
    read_metrics,
    read_record,
    read_records,
    read_scores,
    seconds_in_steps,
    tokens_per_second,
    whole,
)
from pipeline.slurm.states import lacks_nodes
from pipeline.status.slurm import Answer, Last, Queue, answer, ask_queue, ask_slurm, last_attempts
from pipeline.submit.missing import not_submitted
from pipeline.submit.queue import QueuedJob
from pipeline.submit.run_folder import read_cluster

JOB_STATES = ("pending", "running", "completed", "failed", "stopped")
QUEUED = ("Priority", "Resources")  # Slurm's words for a Job whose turn depends on its priority alone
LIVELY = ("pending", "running")
SUCCESS = ("complete", "stopped")  # verdicts that are no failure


@dataclass(frozen=True)
class JobStatus:
    """One Job as it is now: a record that says running while its process is gone has become stopped."""

    stage: str
    segment: int
    job_id: str
    attempt: int | None
    state: str
    reason: str
    log: str | None
    started: float | None  # unix s
    ended: float | None
    nodes: str = ""
    start: str | None = None  # of a Job that waits: when Slurm expects to start it
    time_left: int | None = None  # seconds, of one that runs
    waits_for: str = ""  # Slurm's word for it
    phase: str = ""  # of tokenize, where it is cut into several Jobs

    @property
    def name(self) -> str:
        """Return the word for it: its Stage, or the phase of it."""
        return self.phase or self.stage

    def seconds(self, now: float) -> float | None:
        """Return how long the last attempt has taken."""
        if self.started is None or self.state == "pending":
            return None
        if self.ended is None:
            return max(0.0, now - self.started) if self.state == "running" else None
        return max(0.0, self.ended - self.started)


@dataclass(frozen=True)
class Status:
    """A Run at one moment. What is not known is None."""

    run: Run
    state: str  # planned, pending, running, stopped, failed, completed
    reason: str
    jobs: list[JobStatus]
    source: str  # what the state was read from
    step: int | None = None
    max_steps: int | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    eta_s: float | None = None
    goodput: float | None = None
    time: Split | None = None  # what the wall time of training went into
    scores: list[Score] = field(default_factory=list)
    compressors: dict[str, float] = field(default_factory=dict)
    released: int | None = None  # step
    queue: Queue = field(default_factory=Queue)
    not_submitted: list[str] = field(default_factory=list)  # Jobs of a living chain that are not at Slurm

    def to_json(self) -> dict[str, Any]:
        """Return the contract of `status --json`."""
        return {
            "run": str(self.run.root),
            "state": self.state,
            "jobs": [asdict(job) for job in self.jobs],
            "step": self.step,
            "max_steps": self.max_steps,
            "loss": self.loss,
            "tokens_per_s": self.tokens_per_s,
            "eta_s": self.eta_s,
            "goodput": self.goodput,
            "time": self.time.to_json() if self.time else None,
            "released": self.released,
            "scores": [score.to_json() for score in self.scores],
            "not_submitted": self.not_submitted,
            **self.queue.to_json(),
            "source": self.source,
        }


def read_state(run: Run, config: Config | None = None) -> Status:
    """Tell the state, its reason and the Jobs alone; the numbers, which cost reading the curves, stay None."""
    config = config or read_config(run)
    most = config.pretrain.max_steps if config else None
    if (place := place_of(run)).copied:  # the Jobs in its records are the original's
        reason = f"a copy of {place.former}, with no Jobs of its own; go on with it: {command('resume', run.root)}"
        return Status(run, "planned", reason, [], "run.json", max_steps=most)
    if is_on_slurm(run):
        lasts = last_attempts(run)
        found, source = ask_slurm(run, lasts)
        jobs = _slurm_jobs(found, lasts)
        state, reason = _slurm_state(run, config, jobs)
        missing = _not_submitted(run, config, found) if state in LIVELY else []
        return Status(run, state, reason, jobs, source, max_steps=most, not_submitted=missing)
    record = read_record(run.jobs)
    jobs = _jobs(run, record)
    state, reason, source = _state(run, config, record, jobs)
    return Status(run, state, reason, jobs, source, max_steps=most)


def read_status(run: Run) -> Status:
    """Tell all that is known of a Run. Never raises for a torn, missing or half-written file."""
    config = read_config(run)
    status = read_state(run, config)
    waiting = [job.job_id for job in status.jobs if job.state == "pending" and job.waits_for in QUEUED]
    if any(lacks_nodes(job.waits_for) for job in status.jobs):
        waiting = []  # no priority helps that one, and Slurm was asked about its nodes instead
    on_slurm = is_on_slurm(run)
    metrics = read_metrics(run)
    last = metrics[-1] if metrics else {}
    steps = run.checkpoint_steps()
    step = last.get("step", steps[-1] if steps else None)
    speed = tokens_per_second(metrics)
    running, goes_on = status.state == "running", status.state in ("running", "pending")
    training = any(job.stage == "pretrain" and job.state == "running" for job in status.jobs)
    split = read_split(run, time.time() if training else None)
    estimate = _goodput(metrics, read_records(run.events), time.time() if running else None)
    return replace(
        status,
        step=step,
        loss=number(last.get("loss")),
        tokens_per_s=speed,
        eta_s=seconds_left(config, step, speed) if goes_on and config and speed and step is not None else None,
        goodput=split.goodput if split else estimate,
        time=split,
        scores=read_scores(run),
        compressors=read_compressors(run),
        released=released(run),
        queue=ask_queue(run, waiting) if on_slurm else Queue(),
    )


def seconds_left(config: Config, step: int, speed: float) -> float:
    """Return how long the steps that remain take at `speed` tokens per second."""
    return max(0, config.pretrain.max_steps - step) * tokens_per_step(config) / speed


def _jobs(run: Run, record: Record) -> list[JobStatus]:
    """Return the Jobs of jobs.json, each checked against the processes that are alive."""
    entries = record.get("jobs")
    entries = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    return [_job(run, entry, record) for entry in entries]


def _job(run: Run, entry: Record, record: Record) -> JobStatus:
    state, reason = str(entry.get("state")), str(entry.get("reason") or "")
    job_id, attempt = str(entry.get("job_id", "?")), whole(entry.get("attempt"))
    if state not in JOB_STATES:
        state, reason = "pending", f"jobs.json says {state!r}, which this version does not know"
    if state == "running" and not _alive(entry.get("process")) and not _scheduler_alive(record):
        state, reason = "stopped", f"its process is gone; go on with: {command('resume', run.root)}"
    if state == "failed" and not reason and (verdict := read_attempt(run, job_id, attempt or 0).verdict):
        reason = verdict.reason
    log = entry.get("log")
    return JobStatus(
        stage=str(entry.get("stage", "?")),
        segment=whole(entry.get("segment")) or 0,
        job_id=job_id,
        attempt=attempt,
        state=state,
        reason=reason,
        log=str(log) if log else None,
        started=number(entry.get("started")),
        ended=number(entry.get("ended")),
    )


def _slurm_jobs(found: list[QueuedJob], lasts: dict[tuple[str, str], Last]) -> list[JobStatus]:
    """Return the Jobs of the ledger with what Slurm says of them now."""
    return [
        JobStatus(
            record.stage, segment, str(record.job_id), said.attempt, said.state, said.reason, said.log, said.started,
            said.ended, said.nodes, said.start, said.time_left, said.waits_for, record.phase,
        )
        for record, said, segment in _shown([(queued.record, answer(queued, lasts)) for queued in found])
    ]  # fmt: skip


def _not_submitted(run: Run, config: Config | None, found: list[QueuedJob]) -> list[str]:
    """Name the Jobs of the chain that are missing; none where that cannot be said."""
    if config is None:
        return []
    try:
        return not_submitted(run, config, read_cluster(run), [queued for queued in found if queued.alive])
    except UserError:
        return []


def _shown(told: list[tuple[JobRecord, Answer]]) -> list[tuple[JobRecord, Answer, int]]:
    """Choose the Jobs that say something, in the order of the chain, each with its number among several of a kind.

    Left out are those that ended without having begun where another one has taken their place, and evaluate Jobs beside
    training that are over.
    """
    begun = {record.kind for record, answered in told if answered.started is not None or answered.state in LIVELY}
    kept = [
        (record, answered)
        for record, answered in told
        if answered.state in LIVELY
        or (record.role != "chain" and not record.closed and answered.started is not None)
        or (record.role == "chain" and (answered.started is not None or record.kind not in begun))
    ]
    segments = [record for record, _ in kept if record.stage == "pretrain"]
    beside = [record for record, _ in kept if record.role == "beside"]
    numbers = {record.number: at for at, record in enumerate(segments, 1)} if len(segments) > 1 else {}
    numbers |= {record.number: at for at, record in enumerate(beside, 1)}
    stages = {stage: at for at, stage in enumerate(STAGES)}
    kept.sort(key=lambda pair: (stages.get(pair[0].stage, -1), pair[0].role != "beside"))
    return [(record, said, record.segment or numbers.get(record.number, 0)) for record, said in kept]


def _slurm_state(run: Run, config: Config | None, jobs: list[JobStatus]) -> tuple[str, str]:
    """Return state and reason of a Run whose Jobs Slurm runs; a Segment that ended early is no failure by itself."""
    for job in jobs:
        if job.state == "running":
            return "running", f"{job.name}: asked to stop" if run.stop.exists() else ""
    if not (missing := _missing(run, config)):
        return "completed", ""
    for job in jobs:
        if job.state == "pending":
            return "pending", f"{job.name}: {job.reason}" if job.reason else ""
    if run.stop.exists():
        return "stopped", "a person ended the chain (control/stop)"
    stage = missing.split()[0].rstrip(":")
    last = next((job for job in reversed(jobs) if job.stage == stage and job.state in ("failed", "stopped")), None)
    if last is not None:
        return last.state, f"{last.name}: {last.reason}" if last.reason else ""
    return ("stopped", missing) if jobs else ("planned", "")


def _scheduler_alive(record: Record) -> bool:
    """Tell whether the local scheduler, which writes jobs.json, lives."""
    return _alive(record)


def _state(run: Run, config: Config | None, record: Record, jobs: list[JobStatus]) -> tuple[str, str, str]:
    """Return state, reason and source."""
    if not jobs:
        return _state_without_jobs(run, config)
    source = _source(record)
    current = {(job.stage, job.segment): job for job in jobs}.values()  # a Job that was submitted again counts once
    for state in ("running", "failed", "stopped"):
        for job in current:
            if job.state == state:
                reason = "asked to stop" if state == "running" and run.stop.exists() else job.reason
                return state, f"{job.stage}: {reason}" if reason else "", source
    if not (missing := _missing(run, config)):
        return "completed", "", f"{source}; checkpoint, scores and samples are there"
    if any(job.state == "pending" for job in current) and _scheduler_alive(record):
        return "pending", "", source
    if all(job.state == "pending" and job.started is None for job in current):
        return "planned", "", source
    return "stopped", missing, source


def _source(record: Record) -> str:
    host, pid = record.get("host", "?"), record.get("pid", "?")
    if host != socket.gethostname():
        return f"jobs.json, written by process {pid} on {host}, which cannot be looked at from here"
    return f"jobs.json, written by process {pid}, which {'is alive' if _alive(record) else 'has ended'}"


def _alive(record: Any) -> bool:
    """Tell whether a recorded process lives; a garbled record names none."""
    try:
        return is_alive(record)
    except (TypeError, ValueError):
        return False


def _state_without_jobs(run: Run, config: Config | None) -> tuple[str, str, str]:
    """Tell the state of a Run that no scheduler knows: planned only, or its job scripts were started by hand."""
    owner = read_record(run.control / "owner.json")
    if _alive(owner):
        reason = f"started by hand, process {owner['pid']} on {owner.get('host')}"
        return "running", reason, "control/owner.json (no jobs.json)"
    if not (missing := _missing(run, config)):
        return "completed", "", "checkpoint, scores and samples (no jobs.json)"
    settled = [(one.name, one.verdict) for one in all_attempts(run) if one.verdict]
    if not settled:
        return "planned", "", "no jobs.json and no attempt yet"
    (_, verdict), source = settled[-1], f"attempts/{settled[-1][0]} (no jobs.json)"
    if verdict.verdict in SUCCESS:
        return "stopped", missing, source
    return "failed", f"{verdict.stage}: {verdict.reason}", source


def _missing(run: Run, config: Config | None) -> str:
    """Say which output a completed Run would have and this one has not; nothing if all are there."""
    if config is None:
        return "config.yaml cannot be read, so what is complete is not known"
    for stage in STAGES:
        try:
            complete = is_complete(run, config, stage)
        except (OSError, ValueError) as error:
            return f"{stage}: {error}"
        if not complete:
            return f"{stage} is not complete"
    return ""


def _goodput(metrics: list[Record], events: list[Record], now: float | None) -> float | None:
    """Estimate the share of the time since training first started that went into the steps that count.

    Lost steps, start-up, saves, stops and waiting in a queue all lower it. `now` is the time for a Run that goes on;
    else its last sign of life ends it.
    """
    training = [event for event in events if event.get("stage", "pretrain") == "pretrain"]
    times = [value for row in [*training, *metrics] if (value := number(row.get("time"))) is not None]
    starts = [event for event in training if event.get("event") == "start"]
    first = number(starts[0].get("time")) if starts else None
    if first is None or not metrics:
        return None
    wall = (now or max(times)) - first
    return min(1.0, seconds_in_steps(metrics) / wall) if wall > 0 else None
