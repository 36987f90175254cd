"""What comes after an attempt, and whether a new one may begin: rules on plain records, no Slurm and no disk.

A Run of weeks meets time limits, preemption, dead nodes, full disks and mistakes. What can heal is tried again, within
bounds; what cannot ends the chain at once, before it burns an allocation a second time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from pipeline.errors import EXIT_DONE, EXIT_NO_PROGRESS, EXIT_STOPPED
from pipeline.run.blame import standing
from pipeline.run.cause import cause_of, is_temporary, may_be_a_machine
from pipeline.run.verdict import COMPLETE, ENVIRONMENT, EXIT_CODES, LOST, OUT_OF_MEMORY, STOPPED

# Verdicts that another attempt cannot change.
FINAL = ("config", "storage", "diverged", "no_progress")
TRIES = 2  # times that the same cause may come in a row without a new step: the second time ends the chain
# The same words that a machine or the network may be behind come twice by chance: they may come twice as often.
MACHINE_FACTOR = 2
# Attempts in a row without a new step, whatever they died of. On 1,000 nodes (node MTBF 150 days, 20 min to the first
# save) eight random failures in a row come once in a million Runs of six weeks, with twice the nodes or twice the time
# to a save once in 3,000 (plan/survival.py); the pauses between them add up to an hour and a half.
MOST_FAILURES = 8
# Preemptions in a row without a new step. Where the nodes are taken away after a mean time as long as the first save
# takes, 100 in a row do not happen; where they are taken 20 times as fast, nothing will ever be trained.
MOST_PREEMPTIONS = 100
OUT_OF_MEMORY_ATTEMPTS = 2
PAUSE, LONGEST_PAUSE = 60, 1800  # seconds before the next attempt: doubled with each that made no step
TOLD = 10  # attempts whose reasons are listed


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
    cause: str = ""  # the same key: the same cause; empty: made from verdict and reason
    blamed: list[str] = field(default_factory=list)  # nodes
    sure: bool = False  # other nodes of this attempt were looked at, and fine: the blame stands
    names: list[str] = field(default_factory=list)  # of its nodes, where they are known
    environment: str = ""  # interpreter and image that it ran with

    @property
    def fruitless(self) -> bool:
        return self.after <= self.before and not self.preempted and self.verdict != COMPLETE

    @property
    def key(self) -> str:
        return self.cause or cause_of(self.verdict, self.reason, self.names)


@dataclass(frozen=True)
class Decision:
    """What to do, and why in words for a person. go_on: the chain continues, by a successor or by a requeue."""

    action: Literal["go", "skip", "end", "go_on"]
    reason: str = ""
    code: int = EXIT_DONE
    cancel_rest: bool = False  # the Run's other Jobs would wait in vain
    delay: int = 0  # seconds that the next attempt should wait


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
    """Say why more attempts would be in vain, with the reasons of the last ones; nothing if they may help."""
    if reason := _no_memory(past):
        return reason
    since = _since_a_step(past)
    failed = [attempt for attempt in since if not attempt.preempted]
    if same := _same_cause(failed, tries):
        return f"the same cause {len(same)} times in a row without a new step ({_told(same)})"
    if len(failed) >= max(MOST_FAILURES, MACHINE_FACTOR * tries):
        return f"no new step in the last {len(failed)} attempts ({_told(failed)})"
    if (preempted := len(since) - len(failed)) >= MOST_PREEMPTIONS:
        return (
            f"preempted {preempted} times in a row before a new step was saved; save more often, or ask for a QOS "
            "that is not preempted"
        )
    return ""


def _since_a_step(past: Sequence[Attempt]) -> list[Attempt]:
    """Return the attempts since the last one that made a new step."""
    last = max((at for at, attempt in enumerate(past) if attempt.after > attempt.before), default=-1)
    return [attempt for attempt in past[last + 1 :] if attempt.verdict != COMPLETE]


def _same_cause(failed: Sequence[Attempt], tries: int) -> list[Attempt]:
    """Return the last attempts if they died of one cause, as often as it may come; what time heals is left out."""
    own = [
        attempt
        for attempt, blamed in zip(failed, standing(failed), strict=True)
        if not blamed and not is_temporary(attempt.verdict, attempt.reason)
    ]
    if not own or own[-1] is not failed[-1]:
        return []
    bound = tries * (MACHINE_FACTOR if may_be_a_machine(own[-1].verdict, own[-1].reason) else 1)
    last = own[-bound:]
    return last if len(last) == bound and len({attempt.key for attempt in last}) == 1 else []


def _no_memory(past: Sequence[Attempt]) -> str:
    """Out of memory comes again also where steps were made: memory that leaks, or a batch that is too large."""
    own = [attempt for attempt in past if not attempt.preempted][-OUT_OF_MEMORY_ATTEMPTS:]
    if len(own) < OUT_OF_MEMORY_ATTEMPTS or any(attempt.verdict != OUT_OF_MEMORY for attempt in own):
        return ""
    return f"out of memory in the last {len(own)} attempts ({_told(own)})"


def _told(attempts: Sequence[Attempt]) -> str:
    return "; ".join(f"{a.job_id}.{a.number}: {a.verdict}, {a.reason or 'no reason given'}" for a in attempts[-TOLD:])


def pause(past: Sequence[Attempt]) -> int:
    """Return how many seconds the next attempt waits: 1, 2, 4 … minutes after each that failed without a new step."""
    failed = sum(not attempt.preempted for attempt in _since_a_step(past))
    return min(LONGEST_PAUSE, PAUSE << min(failed - 1, 16)) if failed else 0


def after_attempt(last: Attempt, past: Sequence[Attempt], *, stage: str, stop: bool, tries: int = TRIES) -> Decision:
    """Decide how a Job ends and whether the chain goes on. `past` holds the Stage's attempts before `last`."""
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
    if not keeps and not (last.preempted or last.blamed or last.verdict in (ENVIRONMENT, LOST)):
        # Nothing was kept of what it did, so the same time limit or the same crash would come again.
        return Decision("end", last.reason, code, cancel_rest=stage == "tokenize")  # all the others need the tokens
    delay = 0 if last.preempted else pause([*past, last])
    return Decision("go_on", last.reason, EXIT_DONE if last.verdict == STOPPED else code, delay=delay)
