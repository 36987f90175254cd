"""What comes after an attempt, and whether a new one may begin: rules on plain records, no Slurm and no disk.

A Run of weeks meets time limits, preemption, dead nodes, full disks and mistakes. What can heal is tried again, within
bounds; what cannot ends the chain at once, before it burns an allocation a second time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pipeline.errors import EXIT_DONE, EXIT_NO_PROGRESS, EXIT_STOPPED
from pipeline.run.verdict import COMPLETE, ENVIRONMENT, EXIT_CODES, LOST, OUT_OF_MEMORY, STOPPED

# Verdicts that another attempt cannot change.
FINAL = ("config", "storage", "diverged", "no_progress")
TRIES = 2  # attempts in a row without a new step, after which the chain ends
OUT_OF_MEMORY_ATTEMPTS = 2


@dataclass(frozen=True)
class Attempt:
    """One start of a Job and how it ended."""

    job_id: str
    number: int
    verdict: str
    reason: str
    before: int  # newest checkpoint's step when it began; -1 where there was none
    after: int  # when it ended
    nodes: int = 1
    seconds: float = 0.0
    preempted: bool = False  # its nodes were wanted by someone else: no fault of its own
    ended: float = 0.0  # unix s

    @property
    def fruitless(self) -> bool:
        return self.after <= self.before and not self.preempted and self.verdict != COMPLETE


@dataclass(frozen=True)
class Decision:
    """What to do, and why in words for a person."""

    action: Literal["go", "skip", "end", "requeue"]
    reason: str = ""
    code: int = EXIT_DONE
    cancel_rest: bool = False  # the Run's other Jobs would wait in vain


def may_begin(
    past: Sequence[Attempt],
    *,
    complete: bool,
    stop: bool,
    gpu_hours: float = 0.0,
    most_gpu_hours: float | None = None,
    tries: int = TRIES,
) -> Decision:
    """Decide whether a Job's new attempt works, has nothing to do, or ends the chain. `past` is oldest first."""
    if complete:
        return Decision("skip", "complete already")
    if stop:
        return Decision("end", "control/stop: a person ended the chain", EXIT_STOPPED, cancel_rest=True)
    if most_gpu_hours is not None and gpu_hours >= most_gpu_hours:
        reason = f"{gpu_hours:,.1f} GPU-hours are used, and max_gpu_hours is {most_gpu_hours:,.1f}"
        return Decision("end", reason, EXIT_STOPPED, cancel_rest=True)
    last = past[-1] if past else None
    if last is not None and last.verdict in FINAL:
        reason = f"the attempt before ended with {last.verdict}: {last.reason}"
        return Decision("end", reason, EXIT_CODES[last.verdict], cancel_rest=True)
    if reason := no_progress(past, tries):
        return Decision("end", reason, EXIT_NO_PROGRESS, cancel_rest=True)
    return Decision("go")


def no_progress(past: Sequence[Attempt], tries: int = TRIES) -> str:
    """Say that the last `tries` attempts made no new step, with the reasons of each; nothing if they did."""
    own = [attempt for attempt in past if not attempt.preempted]
    last, memory = own[-tries:], own[-OUT_OF_MEMORY_ATTEMPTS:]
    if len(memory) == OUT_OF_MEMORY_ATTEMPTS and all(attempt.verdict == OUT_OF_MEMORY for attempt in memory):
        last = memory
    elif len(last) < tries or not all(attempt.fruitless for attempt in last):
        return ""
    told = "; ".join(f"{a.job_id}.{a.number}: {a.verdict}, {a.reason or 'no reason given'}" for a in last)
    what = "no new step" if last[-1].fruitless else "no end of memory trouble"
    return f"{what} in the last {len(last)} attempts ({told})"


def after_attempt(
    last: Attempt,
    past: Sequence[Attempt],
    *,
    stage: str,
    stop: bool,
    next_queued: bool,
    may_requeue: bool,
    tries: int = TRIES,
) -> Decision:
    """Decide how a Job ends. `past` holds the Stage's attempts before `last`; `next_queued`: another Segment waits.

    A Segment that ends early exits 0 if another one goes on; the last one requeues itself while progress is made.
    """
    code = EXIT_CODES.get(last.verdict, 1)
    if last.verdict == COMPLETE:
        return Decision("end", code=EXIT_DONE)
    if stage == "preflight":  # alone it only tells; nothing waits for it
        return Decision("end", last.reason, code)
    if stop:
        return Decision("end", "control/stop: a person ended the chain", EXIT_STOPPED, cancel_rest=True)
    if last.verdict in FINAL:
        return Decision("end", last.reason, code, cancel_rest=True)
    if reason := no_progress([*past, last], tries):
        return Decision("end", reason, EXIT_NO_PROGRESS, cancel_rest=True)
    keeps = stage == "pretrain" or (stage == "tokenize" and last.after > last.before)
    if not keeps and not (last.preempted or last.verdict in (ENVIRONMENT, LOST)):
        # Nothing was kept of what it did, so the same time limit or the same crash would come again.
        return Decision("end", last.reason, code)
    if next_queued:
        return Decision("end", "the next Segment goes on", EXIT_DONE if last.verdict == STOPPED else code)
    if may_requeue:
        return Decision("requeue", last.reason)
    return Decision("end", f"{last.reason}; nothing is queued to go on", EXIT_STOPPED)
