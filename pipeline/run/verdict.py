"""How an attempt ended, as files: exit codes get lost on the way through torchrun and srun.

Two records, by two writers: what a rank said (said.json), and what the host made of it (verdict.json).
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from enum import StrEnum

from pipeline import errors
from pipeline.run.folder import Run
from pipeline.run.owner import current, is_alive
from pipeline.run.records import SaidRecord, VerdictRecord


class Verdict(StrEnum):
    """How an attempt ended."""

    COMPLETE = "complete"
    STOPPED = "stopped"  # it was warned, or asked to; what it made is on disk
    CONFIG = "config"
    ENVIRONMENT = "environment"  # a node, a path or an interpreter is not as it should be
    STORAGE = "storage"
    DIVERGED = "diverged"
    NO_PROGRESS = "no_progress"
    HANG = "hang"
    LOST = "lost"  # no process was left to say how it ended
    OUT_OF_MEMORY = "out_of_memory"
    CRASH = "crash"


COMPLETE, STOPPED, CRASH, HANG = Verdict.COMPLETE, Verdict.STOPPED, Verdict.CRASH, Verdict.HANG
ENVIRONMENT, LOST, OUT_OF_MEMORY = Verdict.ENVIRONMENT, Verdict.LOST, Verdict.OUT_OF_MEMORY
WARNED_EARLY = "before its time"  # preempted, or told to stop by a person: no fault of the attempt
OWNER_SECONDS = 600  # how long rank 0 may still be saving after its launcher is gone
# What a launcher dies of that was told to stop before it could pass the signal on: 128 + signal, or minus it.
STOP_STATUS = {
    number: signal.Signals(value).name
    for value in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGHUP, signal.SIGQUIT)
    for number in (128 + value, -value)
}

EXIT_CODES: dict[str, int] = {
    Verdict.COMPLETE: errors.EXIT_DONE,
    Verdict.STOPPED: errors.EXIT_STOPPED,
    Verdict.CONFIG: errors.EXIT_USAGE,
    Verdict.ENVIRONMENT: errors.EXIT_NOT_READY,
    Verdict.STORAGE: errors.EXIT_STORAGE,
    Verdict.DIVERGED: errors.EXIT_DIVERGED,
    Verdict.NO_PROGRESS: errors.EXIT_NO_PROGRESS,
    Verdict.HANG: errors.EXIT_FAILED,
    Verdict.LOST: errors.EXIT_FAILED,
    Verdict.OUT_OF_MEMORY: errors.EXIT_FAILED,
    Verdict.CRASH: errors.EXIT_FAILED,
}
OF_EXIT_CODE: dict[int, str] = {code: verdict for verdict, code in EXIT_CODES.items()}  # of 1: crash, the last of those


def say(text: str) -> None:
    """Print to stderr; where that is a file on a full disk, the exit code has to say it all."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def write_said(
    run: Run,
    job_id: str,
    attempt: int,
    stage: str | None,
    verdict: str,
    reason: str,
    step: int | None,
    *,
    nodes: Sequence[str] = (),
) -> None:
    """Record what this process says of the end of its attempt, and which `nodes` it found unfit."""
    SaidRecord(
        verdict=verdict, reason=reason, step=step, stage=stage or os.environ.get("PIPELINE_STAGE"), nodes=list(nodes),
        began=script_began(), time=time.time(), host=socket.gethostname(), pid=os.getpid(),
    ).write(run.said(job_id, attempt))  # fmt: skip


def script_began() -> float | None:
    """Return when this attempt's job script began (unix s)."""
    try:
        return float(os.environ["PIPELINE_STARTED"])
    except (KeyError, ValueError):
        return None


def said_of(run: Run, job_id: str, attempt: int) -> SaidRecord | None:
    """Return what a rank said of the attempt's end, None where none could."""
    record = SaidRecord.read(run.said(job_id, attempt))
    return record if record is not None and record.verdict in EXIT_CODES else None


def said_since(run: Run, job_id: str, attempt: int, started: float) -> SaidRecord | None:
    """Return what was said after `started` (unix s): an attempt's number may be used twice by hand."""
    record = said_of(run, job_id, attempt)
    return record if record is not None and record.time >= started else None


def how_it_ended(
    run: Run,
    job_id: str,
    attempt: int,
    stage: str | None = None,
    exit_status: int | None = None,
    *,
    from_srun: bool = False,
) -> SaidRecord:
    """Return what was said of an attempt's end; where no rank could say it, it crashed, whatever its exit status.

    With `stage`, another one's success does not count: preflight comes before pretrain in the same attempt. srun ends
    with 143 also where it has killed the other tasks of one that failed, so its status does not tell of a stop.
    """
    record = said_of(run, job_id, attempt)
    if record is not None and not (record.verdict == COMPLETE and stage is not None and record.stage != stage):
        return record
    if run.warned(job_id, attempt).is_file():
        return SaidRecord(verdict=STOPPED, reason="stopped before the stage began", stage=stage)
    if exit_status in STOP_STATUS and not from_srun:
        reason = f"stopped by {STOP_STATUS[exit_status]} before the stage began"
        return SaidRecord(verdict=STOPPED, reason=reason, stage=stage)
    return SaidRecord(verdict=CRASH, reason=_explain(exit_status), stage=stage)


def verdict_of(run: Run, job_id: str, attempt: int) -> VerdictRecord | None:
    """Return how an attempt ended, None where nobody has settled that."""
    return VerdictRecord.read(run.verdict(job_id, attempt))


def await_owner(run: Run, job_id: str, attempt: int, stage: str) -> None:
    """Wait while rank 0 of this attempt lives on without its launcher: it is saving, and will leave a verdict."""
    deadline = time.monotonic() + OWNER_SECONDS
    while time.monotonic() < deadline:
        _, holder = current(run.owner_of(stage, job_id))
        ours = holder is not None and (holder.get("job_id"), holder.get("attempt")) == (job_id, attempt)
        if not ours or not is_alive(holder) or holder is None or holder.get("host") != socket.gethostname():
            return
        time.sleep(0.2)


def _explain(exit_status: int | None) -> str:
    if exit_status is None:
        return "the processes are gone and left no verdict"
    if exit_status == 137:
        return "killed (SIGKILL); often the machine ran out of memory"
    if exit_status > 128:
        return f"killed by signal {exit_status - 128}"
    return f"ended with status {exit_status} and left no verdict"
