"""What every stage's main does around its work: find the Run, own it, take signals, leave a verdict."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from pipeline.config.load import load_run_config
from pipeline.config.schema import Config
from pipeline.errors import EXIT_DONE, EXIT_FAILED, EXIT_STORAGE, BadNodesError, UserError
from pipeline.files import write_text
from pipeline.run.folder import Run
from pipeline.run.owner import NotOwnerError, belongs_to, check_owner, disown, owned, process_start
from pipeline.run.records import SaidRecord
from pipeline.run.verdict import (
    COMPLETE,
    CRASH,
    EXIT_CODES,
    OF_EXIT_CODE,
    STOPPED,
    said_since,
    say,
    script_began,
    write_said,
)
from pipeline.stages.early import SIGNALS, STARTED, Stopped

FORMER_OWNER_SECONDS = 60
STORAGE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE}
# A rank whose partner has failed gets a network error within moments; the partner's own error says more.
FIRST_ERROR_SECONDS = 3.0


class LostRankError(Exception):
    """Another rank is gone, and this one cannot go on without it."""


@dataclass(frozen=True)
class Attempt:
    """One start of a Job, as the job script named it."""

    stage: str
    job_id: str
    number: int
    rank: int
    world_size: int = 1
    part_of: str = ""  # the stage of the Job that this stage is a step of

    @classmethod
    def from_environment(cls, stage: str) -> Attempt:
        return cls(
            stage,
            os.environ.get("PIPELINE_JOB_ID", f"hand-{stage}"),
            int(os.environ.get("PIPELINE_ATTEMPT", "0")),
            int(os.environ.get("RANK", "0")),
            int(os.environ.get("WORLD_SIZE", "1")),
            os.environ.get("PIPELINE_STAGE", stage),
        )

    @property
    def began(self) -> float:
        """Return when the job script started (unix s); start-up time is counted from here."""
        return script_began() or STARTED


Body = Callable[[Run, Config, Attempt], int | None]


def stop_reason(run: Run, attempt: Attempt) -> str | None:
    """Return why to end now: a signal, a person's stop, or the batch shell's warning; None to go on."""
    if SIGNALS.name is not None:
        return f"asked to stop by {SIGNALS.name}"
    script = os.environ.get("PIPELINE_SCRIPT", "")
    if script.isdigit() and process_start(int(script)) is None:
        return "the job script is gone"
    if run.stop.exists():
        return "control/stop: a person ended the chain"
    try:
        return f"asked to stop by {run.warned(attempt.job_id, attempt.number).read_text().strip()}"
    except FileNotFoundError:
        return None


def poll(run: Run, attempt: Attempt) -> None:
    """Raise Stopped if there is a reason to end; for stages that hold nothing worth saving, between two batches."""
    if (reason := stop_reason(run, attempt)) is not None:
        raise Stopped(reason)


def run_stage(stage: str, body: Body, *, polls: bool = False, owns: bool = True) -> int:
    """Run `body(run, config, attempt)`, which returns the step it ended at, and return the exit code.

    Stop signals raise Stopped in the body, unless it `polls` stop_reason itself. One that writes none of the Run's
    outputs need not own it.
    """
    if len(sys.argv) != 2:
        print(f"usage: python -m pipeline.stages.{stage} RUN", file=sys.stderr)
        return 2
    attempt = Attempt.from_environment(stage)
    run = Run(Path(sys.argv[1]).absolute())

    def work() -> int | None:
        warned = run.warned(attempt.job_id, attempt.number)
        if SIGNALS.name is not None and not SIGNALS.rank_lost and attempt.world_size > 1:
            write_text(warned, SIGNALS.name)  # the others would wait for this rank
        if SIGNALS.name is not None or warned.is_file():
            raise Stopped("stopped before the stage began")
        return body(Run.open(run.root), load_run_config(run.config), attempt)

    try:
        with nullcontext() if polls else SIGNALS.raising(), _ownership(run, attempt) if owns else nullcontext():
            code = _guarded(run, attempt, work, owns)
    except NotOwnerError as error:
        return _superseded(run, attempt, error)
    except BaseException as error:  # before there was an owner: a stop while waiting, or another owner
        code = _end_by(run, attempt, error, owner=False)
    if owns and attempt.world_size > 1 and code != EXIT_DONE:
        leave(code)  # the other ranks may be stuck in a collective: a clean shutdown would wait for them
    return code


def _guarded(run: Run, attempt: Attempt, work: Callable[[], int | None], owner: bool) -> int:
    """Do the work and leave a verdict while this process still owns the Run."""
    try:
        _event(run, attempt, "start", began=attempt.began)
        step = work()
    except NotOwnerError:
        raise
    except BaseException as error:
        return _end_by(run, attempt, error, owner=owner)
    return _end(run, attempt, COMPLETE, "", step, owner=owner)


def _end_by(run: Run, attempt: Attempt, error: BaseException, *, owner: bool = True) -> int:
    """Leave the verdict that belongs to an error, and print the traceback of one that is ours."""
    if isinstance(error, Stopped):
        return _end(run, attempt, STOPPED, str(error), error.step, owner=owner)
    if isinstance(error, UserError):
        nodes = error.nodes if isinstance(error, BadNodesError) else ()
        return _end(run, attempt, OF_EXIT_CODE.get(error.exit_code, CRASH), str(error), None, owner=owner, nodes=nodes)
    if not isinstance(error, Exception):
        raise error
    if isinstance(error, LostRankError) and (first := _first_said(run, attempt)) is not None:
        say(f"rank {attempt.rank} ends, since another has failed: {first.reason}")
        return EXIT_CODES.get(first.verdict, EXIT_FAILED)
    reason = f"{type(error).__name__}: {error}" if not isinstance(error, LostRankError) else str(error)
    storage = isinstance(error, OSError) and error.errno in STORAGE_ERRORS
    if attempt.world_size > 1:
        reason = f"rank {attempt.rank}: {reason}"
    if not isinstance(error, LostRankError):  # its own traceback is only that of the broken connection
        lines = "".join(traceback.format_exception(error))
        say(f"{attempt.stage}: first error, on rank {attempt.rank}:\n{lines}")
    return _end(run, attempt, "storage" if storage else CRASH, reason, None, owner=owner)


def _first_said(run: Run, attempt: Attempt) -> SaidRecord | None:
    """Wait a moment for the word of the rank that failed first."""
    deadline = time.monotonic() + FIRST_ERROR_SECONDS
    while time.monotonic() < deadline:
        if (record := said_since(run, attempt.job_id, attempt.number, STARTED)) is not None:
            return record
        time.sleep(0.1)
    return None


@contextmanager
def _ownership(run: Run, attempt: Attempt) -> Iterator[None]:
    """Let rank 0 own the Run's outputs; the ranks of a killed launcher may still be saving."""
    if attempt.rank != 0:
        yield
        return
    details = {"job_id": attempt.job_id, "attempt": attempt.number}
    with owned(run.owner_of(attempt.stage, attempt.job_id), f"Run {run.name}", FORMER_OWNER_SECONDS, **details):
        if attempt.stage == "pretrain":
            _break_unfinished_saves(run)
        yield


def _break_unfinished_saves(run: Run) -> None:
    """Take away the folders in which a former owner was saving: should it wake up, its rename finds nothing."""
    for folder in run.checkpoints.glob(".step-*.tmp"):
        broken = folder.with_name(f"{folder.name}.{os.getpid()}.old")
        try:
            folder.rename(broken)
        except FileNotFoundError:
            continue
        shutil.rmtree(broken, ignore_errors=True)


def fence(run: Run, attempt: Attempt) -> None:
    """Raise NotOwnerError on rank 0 if another attempt has taken the Run over; asked before anything is published."""
    if attempt.rank == 0:
        check_owner(run.owner_of(attempt.stage, attempt.job_id))


def _event(run: Run, attempt: Attempt, kind: str, **details: object) -> None:
    if attempt.rank == 0:
        run.event(kind, stage=attempt.stage, job_id=attempt.job_id, attempt=attempt.number, **details)


def _end(
    run: Run,
    attempt: Attempt,
    verdict: str,
    reason: str,
    step: int | None,
    *,
    owner: bool = True,
    nodes: Sequence[str] = (),
) -> int:
    """Leave the verdict. Rank 0 speaks for all; another rank only where it is the first to fail."""
    SIGNALS.ignore()
    verdict, reason = _believed(verdict, reason)
    if reason:
        say(f"{attempt.stage}: {reason}")
    try:
        if not owner or belongs_to(run.owner_of(attempt.stage, attempt.job_id), attempt.job_id, attempt.number):
            _record(run, attempt, verdict, reason, step, nodes)
    except OSError as error:
        say(f"cannot write the verdict: {error}")
        return EXIT_STORAGE
    if verdict == STOPPED and attempt.world_size > 1:
        return EXIT_DONE  # or torchrun takes it for a failure and kills the ranks that are still saving
    return EXIT_CODES[verdict]


def _believed(verdict: str, reason: str) -> tuple[str, str]:
    """Return a stop that nobody asked for as what it is: torchrun's end of the ranks that outlive another one."""
    if verdict == STOPPED and SIGNALS.rank_lost:
        return CRASH, "another rank was killed, or ended before it could leave a verdict; its error is further up"
    return verdict, reason


def _record(run: Run, attempt: Attempt, verdict: str, reason: str, step: int | None, nodes: Sequence[str]) -> None:
    """Write verdict and event, unless another rank was first."""
    failed = verdict not in (COMPLETE, STOPPED)
    if attempt.rank != 0 and not failed:
        return
    if said_since(run, attempt.job_id, attempt.number, STARTED) is not None:
        return
    if verdict != COMPLETE or attempt.part_of in ("", attempt.stage):  # else the Job's main stage is still to come
        write_said(run, attempt.job_id, attempt.number, attempt.stage, verdict, reason, step, nodes=nodes)
    details: dict[str, object] = {"reason": reason} if reason else {}
    details |= {"nodes": list(nodes)} if nodes else {}
    details |= {"rank": attempt.rank} if attempt.world_size > 1 and failed else {}
    kinds: dict[str, str] = {COMPLETE: "complete", STOPPED: "stop"}
    kind = kinds.get(verdict, "failure")
    run.event(
        kind, stage=attempt.stage, job_id=attempt.job_id, attempt=attempt.number, verdict=verdict, step=step, **details
    )


def abandon(run: Run, attempt: Attempt, verdict: str, reason: str, step: int | None) -> None:
    """End this process at once, from a thread, because its main thread cannot be waited for. Does not return."""
    code = EXIT_FAILED
    try:
        if attempt.rank == 0:
            check_owner(run.owner_of(attempt.stage, attempt.job_id))
        verdict, reason = _believed(verdict, reason)
        say(f"{attempt.stage}: {reason}")
        _abandoned_verdict(run, attempt, verdict, reason, step)
        code = EXIT_CODES[verdict] if attempt.world_size == 1 or verdict != STOPPED else EXIT_DONE
        if attempt.rank == 0:
            disown(run.owner_of(attempt.stage, attempt.job_id))
    except Exception as error:
        say(f"{attempt.stage}: {error}")
    finally:
        leave(code)


def _abandoned_verdict(run: Run, attempt: Attempt, verdict: str, reason: str, step: int | None) -> None:
    if not belongs_to(run.owner_of(attempt.stage, attempt.job_id), attempt.job_id, attempt.number):
        return
    if said_since(run, attempt.job_id, attempt.number, STARTED) is None:
        write_said(run, attempt.job_id, attempt.number, attempt.stage, verdict, reason, step)


def _superseded(run: Run, attempt: Attempt, error: NotOwnerError) -> int:
    """End without a verdict: the Run belongs to another attempt, which would read it."""
    say(f"{attempt.stage}: {error}")
    _event(run, attempt, "superseded", reason=str(error))
    if attempt.world_size > 1:
        leave(EXIT_FAILED)
    return EXIT_FAILED


def leave(code: int) -> None:
    """End this process at once, whatever its other threads wait for."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)
