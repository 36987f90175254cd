"""What every stage's main does around its work: find the Run, take signals, leave a verdict."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from pipeline.config import Config
from pipeline.config_load import load_run_config
from pipeline.errors import EXIT_FAILED, UserError
from pipeline.owner import owned
from pipeline.run import Run
from pipeline.verdict import COMPLETE, CRASH, EXIT_CODES, OF_EXIT_CODE, STOPPED, write_verdict

PR_SET_PDEATHSIG = 1
FORMER_OWNER_SECONDS = 60
STORAGE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}


class Stopped(BaseException):
    """The attempt was asked to end. Not an Exception, so that no handler on the way swallows it."""

    def __init__(self, reason: str, step: int | None = None) -> None:
        super().__init__(reason)
        self.step = step


@dataclass(frozen=True)
class Attempt:
    """One start of a Job, as the job script named it."""

    stage: str
    job_id: str
    number: int
    rank: int

    @classmethod
    def from_environment(cls, stage: str) -> Attempt:
        return cls(
            stage,
            os.environ.get("PIPELINE_JOB_ID", f"hand-{stage}"),
            int(os.environ.get("PIPELINE_ATTEMPT", "0")),
            int(os.environ.get("RANK", "0")),
        )


Body = Callable[[Run, Config, Attempt], int | None]


def die_with_parent() -> None:
    """Ask Linux for SIGTERM when the parent ends, so that a killed launcher leaves no ranks behind."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), signal.SIGTERM)


def _raise_stopped(number: int, frame: FrameType | None) -> None:
    raise Stopped(f"stopped by {signal.Signals(number).name}")


def run_stage(stage: str, body: Body) -> int:
    """Run `body(run, config, attempt)`, which returns the step it ended at, and return the exit code.

    SIGTERM, SIGINT and SIGUSR2 raise Stopped in the body unless it installs handlers of its own.
    """
    if len(sys.argv) != 2:
        print(f"usage: python -m pipeline.stages.{stage} RUN", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, _raise_stopped)
    attempt = Attempt.from_environment(stage)
    run = Run(Path(sys.argv[1]).absolute())
    try:
        die_with_parent()
        if run.warned(attempt.job_id, attempt.number).is_file():  # before this process could take a signal
            raise Stopped("stopped before the stage began")
        run = Run.open(run.root)
        config = load_run_config(run.config)
        with _ownership(run, attempt):
            _event(run, attempt, "start")
            step = body(run, config, attempt)
    except Stopped as stopped:
        return _end(run, attempt, STOPPED, str(stopped), stopped.step)
    except UserError as error:
        return _end(run, attempt, OF_EXIT_CODE.get(error.exit_code, CRASH), str(error), None)
    except OSError as error:
        traceback.print_exc()
        kind = "storage" if error.errno in STORAGE_ERRORS else CRASH
        return _end(run, attempt, kind, f"{type(error).__name__}: {error}", None)
    except Exception as error:
        traceback.print_exc()
        return _end(run, attempt, CRASH, f"{type(error).__name__}: {error}", None)
    return _end(run, attempt, COMPLETE, "", step)


def _ownership(run: Run, attempt: Attempt) -> AbstractContextManager[None]:
    """Let rank 0 own the Run's outputs; the ranks of a killed launcher may still be saving."""
    if attempt.rank != 0:
        return nullcontext()
    return owned(
        run.control / "owner.json",
        f"Run {run.name}",
        FORMER_OWNER_SECONDS,
        job_id=attempt.job_id,
        attempt=attempt.number,
    )


def _event(run: Run, attempt: Attempt, kind: str, **details: object) -> None:
    if attempt.rank == 0:
        run.event(kind, stage=attempt.stage, job_id=attempt.job_id, attempt=attempt.number, **details)


def _end(run: Run, attempt: Attempt, verdict: str, reason: str, step: int | None) -> int:
    """Leave the verdict. Rank 0 speaks for all; another rank only where it is the first to fail."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # a second signal must not tear the verdict
    try:
        failed = verdict not in (COMPLETE, STOPPED)
        if attempt.rank == 0 or (failed and not run.verdict(attempt.job_id, attempt.number).exists()):
            write_verdict(run, attempt.job_id, attempt.number, attempt.stage, verdict, reason, step)
        details = {"reason": reason} if reason else {}
        _event(run, attempt, {COMPLETE: "complete", STOPPED: "stop"}.get(verdict, "failure"), step=step, **details)
    except OSError as error:
        print(f"cannot write the verdict: {error}", file=sys.stderr)
        return EXIT_FAILED
    if reason:
        print(f"{attempt.stage}: {reason}", file=sys.stderr)
    return EXIT_CODES[verdict]
