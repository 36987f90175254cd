"""How an attempt ended, as a file: exit codes get lost on the way through torchrun and srun."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from pipeline import errors
from pipeline.files import read_json, write_json
from pipeline.run.folder import Run
from pipeline.run.owner import current, is_alive

COMPLETE, STOPPED, CRASH, HANG = "complete", "stopped", "crash", "hang"
ENVIRONMENT, LOST, OUT_OF_MEMORY = "environment", "lost", "out_of_memory"
WARNED_EARLY = "before its time"  # preempted, or told to stop by a person: no fault of the attempt
OWNER_SECONDS = 600  # how long rank 0 may still be saving after its launcher is gone
# What a launcher dies of that was told to stop before it could pass the signal on: 128 + signal, or minus it.
STOP_STATUS = {
    number: signal.Signals(value).name
    for value in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGHUP, signal.SIGQUIT)
    for number in (128 + value, -value)
}

EXIT_CODES = {
    COMPLETE: errors.EXIT_DONE,
    STOPPED: errors.EXIT_STOPPED,
    "config": errors.EXIT_USAGE,
    ENVIRONMENT: errors.EXIT_NOT_READY,
    "storage": errors.EXIT_STORAGE,
    "diverged": errors.EXIT_DIVERGED,
    "no_progress": errors.EXIT_NO_PROGRESS,
    HANG: errors.EXIT_FAILED,
    LOST: errors.EXIT_FAILED,  # no process was left to say how it ended
    OUT_OF_MEMORY: errors.EXIT_FAILED,
    CRASH: errors.EXIT_FAILED,
}
OF_EXIT_CODE = {code: verdict for verdict, code in EXIT_CODES.items()}  # of 1: crash, the last of the two


def say(text: str) -> None:
    """Print to stderr; where that is a file on a full disk, the exit code has to say it all."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def write_verdict(
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
    """Record how attempt `attempt` of a Job ended, when its job script began (None without one), and bad `nodes`."""
    record: dict[str, Any] = {"verdict": verdict, "reason": reason, "step": step}
    record |= {"stage": stage or os.environ.get("PIPELINE_STAGE")} | ({"nodes": list(nodes)} if nodes else {})
    record |= {"began": script_began(), "time": time.time(), "host": socket.gethostname(), "pid": os.getpid()}
    write_json(run.verdict(job_id, attempt), record)


def script_began() -> float | None:
    """Return when this attempt's job script began (unix s)."""
    try:
        return float(os.environ["PIPELINE_STARTED"])
    except (KeyError, ValueError):
        return None


def read_verdict(
    run: Run,
    job_id: str,
    attempt: int,
    stage: str | None = None,
    exit_status: int | None = None,
    *,
    from_srun: bool = False,
) -> dict[str, Any]:
    """Return the verdict; where no rank could write one, it crashed, whatever its exit status says.

    With `stage`, another one's success does not count: preflight comes before pretrain in the same attempt. srun ends
    with 143 also where it has killed the other tasks of one that failed, so its status does not tell of a stop.
    """
    record = read_json(run.verdict(job_id, attempt))
    if isinstance(record, dict) and record.get("verdict") in EXIT_CODES:
        passed = record["verdict"] == COMPLETE and stage is not None and record.get("stage") != stage
        if not passed:
            return record
    if run.warned(job_id, attempt).is_file():
        return {"verdict": STOPPED, "reason": "stopped before the stage began", "stage": stage, "step": None}
    if exit_status in STOP_STATUS and not from_srun:
        reason = f"stopped by {STOP_STATUS[exit_status]} before the stage began"
        return {"verdict": STOPPED, "reason": reason, "stage": stage, "step": None}
    return {"verdict": CRASH, "reason": _explain(exit_status), "stage": stage, "step": None}


def verdict_since(run: Run, job_id: str, attempt: int, started: float) -> dict[str, Any] | None:
    """Return the attempt's verdict if one was written after `started` (unix s): a number may be used twice by hand."""
    record = read_json(run.verdict(job_id, attempt))
    return record if isinstance(record, dict) and record.get("time", 0) >= started else None


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
