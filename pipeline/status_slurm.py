"""The Jobs of a Run as Slurm sees them, and as their own verdicts tell where Slurm has forgotten them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import UserError
from pipeline.records import number, read_record
from pipeline.run import Run
from pipeline.slurm_jobs import SlurmJob
from pipeline.submit import read_cluster
from pipeline.verdict import COMPLETE, STOPPED

Record = dict[str, Any]

RUNNING = ("running", "completing", "suspended")
WAITING = ("pending", "requeued", "requeue_hold")
LOG = re.compile(r".*\.(\d+)\.log")


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


def ask_slurm(run: Run, record: Record) -> tuple[dict[str, SlurmJob], str]:
    """Return the Run's Jobs by id, and where that was read; none where the scheduler does not answer."""
    ids = [str(job["job_id"]) for job in record.get("jobs", []) if isinstance(job, dict) and job.get("job_id")]
    try:
        jobs = read_cluster(run).slurm().jobs(ids)
    except UserError as error:
        return {}, f"jobs.json and verdicts; Slurm does not answer ({str(error).splitlines()[0]})"
    sources = sorted({job.source for job in jobs.values()})
    return jobs, f"Slurm ({', '.join(sources)})" if sources else "Slurm"


def answer(run: Run, entry: Record, job: SlurmJob | None) -> Answer:
    """Tell how one Job of jobs.json is doing."""
    job_id, stage = str(entry.get("job_id")), str(entry.get("stage"))
    attempt, log = _last_log(run, stage, job_id)
    verdict = read_record(run.verdict(job_id, attempt)) if attempt is not None else {}
    began = read_record(run.beginning(job_id, attempt)) if attempt is not None else {}
    started, ended = number(began.get("time")), number(verdict.get("time"))
    state, reason = _state(job, verdict)
    if state in ("running", "pending"):
        ended = None
    return Answer(
        state, reason, attempt, log, started if state != "pending" else None, ended,
        job.nodes if job else "", job.start if job else None,
    )  # fmt: skip


def _state(job: SlurmJob | None, verdict: Record) -> tuple[str, str]:
    kind, why = verdict.get("verdict"), str(verdict.get("reason") or "")
    if job is not None and job.state in RUNNING:
        return "running", ""
    if job is not None and job.state in WAITING:
        return "pending", job.explain()
    if kind == COMPLETE:
        return "completed", ""
    if kind == STOPPED:
        return "stopped", why
    if kind is not None:
        return "failed", f"{kind}: {why}" if why else str(kind)
    if job is None or job.state.startswith("unknown"):
        return "stopped", "Slurm no longer knows this job, and it left no verdict"
    if job.success:
        return "completed", "had nothing to do"
    return "failed" if job.state != "cancelled" else "stopped", job.explain() or job.state


def _last_log(run: Run, stage: str, job_id: str) -> tuple[int | None, str | None]:
    """Return the newest attempt of a Job, by its log, and that log's path inside the Run."""
    found: dict[int, Path] = {}
    for path in run.logs.glob(f"{stage}-{job_id}.*.log"):
        if match := LOG.fullmatch(path.name):
            found[int(match[1])] = path
    if not found:
        return None, None
    attempt = max(found)
    return attempt, str(found[attempt].relative_to(run.root))
