"""The attempts of a Run: how each began and how it ended. The flat files of version 0.1.0 are read too."""

from __future__ import annotations

import re
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.run.blame import Blame
from pipeline.run.cause import cause_of
from pipeline.run.decision import Attempt
from pipeline.run.folder import Run
from pipeline.run.records import BeginRecord, SaidRecord, VerdictRecord, number, read_record
from pipeline.run.verdict import LOST, STOPPED, WARNED_EARLY, how_it_ended, said_of
from pipeline.slurm.node_lists import few_nodes

EARLY_SECONDS = 120.0  # that a warning of the time limit may come before its time: Slurm's 60 s, and a busy node's

NAME = re.compile(r"(?P<job_id>.+)\.(?P<number>[0-9]+)")
# What version 0.1.0 called the same: files JOB.N.begin and JOB.N.json beside each other, and these keys in them.
OLD_KEYS = {"before": "step_at_start", "after": "step_at_end"}


@dataclass(frozen=True)
class AttemptRecords:
    """What an attempt has left behind. One without a verdict runs, or was killed with all that could have left one."""

    job_id: str
    number: int
    begin: BeginRecord | None
    verdict: VerdictRecord | None

    @property
    def name(self) -> str:
        return f"{self.job_id}.{self.number}"

    @property
    def stage(self) -> str | None:
        return self.begin.stage if self.begin else self.verdict.stage if self.verdict else None

    @property
    def part(self) -> str:
        return self.begin.part if self.begin else ""

    @property
    def began(self) -> float:
        """Return when it began (unix s), 0 where that is not known."""
        return (self.begin.time if self.begin else 0.0) or (self.verdict and self.verdict.began) or 0.0

    @property
    def order(self) -> tuple[float, str, int]:
        return self.began or (self.verdict.time if self.verdict else 0.0), self.job_id, self.number


def all_attempts(run: Run, stage: str | None = None, part: str | None = None) -> list[AttemptRecords]:
    """Return what all attempts have left, or those of one Stage, or of a part of its work; oldest first."""
    try:
        names = {match.group() for path in run.attempts.iterdir() if (match := NAME.match(path.name))}
    except OSError:
        return []
    found = [_read(run, match["job_id"], int(match["number"])) for name in names if (match := NAME.fullmatch(name))]
    chosen = [
        records for records in found
        if (records.begin or records.verdict)
        and stage in (None, records.stage) and part in (None, records.part)
    ]  # fmt: skip
    return sorted(chosen, key=lambda records: records.order)


def read_attempt(run: Run, job_id: str, number_: int) -> AttemptRecords:
    """Return what one attempt has left."""
    return _read(run, job_id, number_)


def _read(run: Run, job_id: str, number_: int) -> AttemptRecords:
    if run.attempt(job_id, number_).is_dir():
        begin = BeginRecord.read(run.beginning(job_id, number_))
        verdict = VerdictRecord.read(run.verdict(job_id, number_))
        return AttemptRecords(job_id, number_, begin and begin.but(job_id=job_id, number=number_), verdict)
    begin = _old(BeginRecord, run.attempts / f"{job_id}.{number_}.begin")
    verdict = _old(VerdictRecord, run.attempts / f"{job_id}.{number_}.json")
    return AttemptRecords(job_id, number_, begin and begin.but(job_id=job_id, number=number_), verdict)


def _old(kind: type[Any], path: Path) -> Any:
    """Read a file of version 0.1.0."""
    record = read_record(path)
    renamed = {OLD_KEYS.get(key, key): value for key, value in record.items()}
    try:
        return kind.model_validate(renamed)
    except ValueError:
        return None


def account_of(run: Run, job_id: str, number_: int) -> dict[str, Any]:
    """Return what an attempt's time went into, as training wrote it; empty where it has not."""
    return read_record(run.ledger(job_id, number_)) or read_record(run.attempts / f"{job_id}.{number_}.time")


def newest_step(run: Run) -> int:
    """Return the newest checkpoint's step, -1 where there is none."""
    return max(run.checkpoint_steps(), default=-1)


def progress(run: Run, stage: str, part: str) -> int:
    """Return what an attempt must raise so as not to have been in vain: the newest checkpoint's step.

    For tokenize: -1 before there is a tokenizer, then how many pieces are encoded and shards finished; for a task of an
    array, how many of its pieces.
    """
    if stage != "tokenize":
        return newest_step(run)
    if not run.tokenizer.is_file():
        return -1
    try:
        names = [path.name for path in run.piece(0).parent.iterdir()]
    except OSError:  # none yet
        return 0
    pieces = [int(name) for name in names if name.isdigit()]
    if "/" in part:
        _, task, tasks = part.split("/")
        return sum(number % int(tasks) == int(task) for number in pieces)
    return len(pieces) + sum(name.endswith(".json") for name in names)


def past_attempts(run: Run, stage: str, part: str = "") -> list[Attempt]:
    """Return the attempts of a Stage, or a part of its work, that have ended, oldest first, as the rules see them.

    One that left no verdict ended when the next began: it was killed with all that could have written one.
    """
    records = [one for one in all_attempts(run, stage, part) if one.begin]
    attempts = []
    for one, following in zip(records, [*records[1:], None], strict=False):
        if one.verdict is None and following is None:
            continue  # it runs
        attempts.append(_as_attempt(one, following, progress(run, stage, part)))
    return attempts


def _as_attempt(one: AttemptRecords, following: AttemptRecords | None, now: int) -> Attempt:
    assert one.begin is not None
    verdict = one.verdict or VerdictRecord(verdict=LOST)
    begun = following.begin if following else None
    at_end, ended = verdict.step_at_end, verdict.time or (begun.time if begun else one.begin.time)
    if at_end is None:
        at_end = begun.step_at_start if begun else now
    return as_attempt(one.begin, verdict.but(step_at_end=at_end, time=ended))


def as_attempt(begin: BeginRecord, verdict: VerdictRecord) -> Attempt:
    """Return an attempt that has ended as the rules see it."""
    return Attempt(
        begin.job_id, begin.number, verdict.verdict, verdict.reason, begin.step_at_start,
        verdict.step_at_end if verdict.step_at_end is not None else -1, len(begin.nodes) or 1,
        max(0.0, verdict.time - begin.time), verdict.warned == WARNED_EARLY, verdict.time, cause=verdict.cause,
        blamed=list(verdict.nodes), sure=verdict.sure, names=list(begin.nodes), environment=begin.environment,
    )  # fmt: skip


def settle(
    run: Run, begin: BeginRecord, said: SaidRecord, warned: str | None, *,
    blame: Blame | None = None, units: int | None = None, ended: float | None = None,
) -> VerdictRecord:  # fmt: skip
    """Write the verdict of an attempt: what was said of its end, and what only the host knows."""
    blame = blame or Blame()
    verdict = VerdictRecord(
        verdict=said.verdict, reason=said.reason, step=said.step, stage=begin.stage,
        cause=cause_of(said.verdict, said.reason, begin.nodes), nodes=list(blame.nodes), sure=blame.sure,
        step_at_start=begin.step_at_start, step_at_end=progress(run, begin.stage, begin.part), warned=warned,
        units=units, began=said.began or begin.time, time=ended or said.time or time.time(),
        host=said.host or socket.gethostname(),
    )  # fmt: skip
    verdict.write(run.verdict(begin.job_id, begin.number))
    return verdict


def warned_by(run: Run, begin: BeginRecord, limit: float | None = None, lead: int | None = None) -> str | None:
    """Return what warned an attempt, None where nothing did; WARNED_EARLY where it was not its own time limit.

    `limit` (unix s) and `lead` (s) are for one whose beginning has not kept them.
    """
    path = run.warned(begin.job_id, begin.number)
    limit = begin.deadline or limit
    lead = lead if begin.signal_lead is None else begin.signal_lead
    if not path.is_file() or limit is None or lead is None:
        return None
    at = path.stat().st_mtime  # a slow save may have followed
    return WARNED_EARLY if at < limit - lead - EARLY_SECONDS else "time limit"


def settle_lost(run: Run, stage: str, now: str, number_: int, part: str = "") -> list[BeginRecord]:
    """Give those earlier attempts that left no verdict one, so that they count; return them.

    Only for an attempt that owns the Run: whoever stood there before is gone, and can settle nothing any more.
    """
    lost = []
    for one in all_attempts(run, stage, part):
        if one.begin is None or one.verdict is not None or (one.job_id, one.number) == (now, number_):
            continue
        said = how_it_ended(run, one.job_id, one.number, stage)
        nodes = few_nodes(one.begin.nodes) if one.begin.nodes else ""
        ended = None
        if said.verdict == "crash":
            # Its last sign of life; what came after was waiting for nodes.
            ended = number(account_of(run, one.job_id, one.number).get("until")) or one.begin.time
            reason = f"no process was left to say how it ended; it ran on {nodes or 'unknown nodes'}"
            said = SaidRecord(verdict=LOST, reason=reason)
        warned = warned_by(run, one.begin)
        if warned and said_of(run, one.job_id, one.number) is None:
            if warned == WARNED_EARLY:  # preempted, and Slurm did not leave it the time
                said = SaidRecord(verdict=LOST, reason="killed after it was warned, before its save was whole")
            else:
                told = "killed at its time limit, before its save was whole; raise signal_lead in the cluster file"
                said, warned = SaidRecord(verdict=STOPPED, reason=told), None
        settle(run, one.begin, said, warned, ended=ended)
        run.warned(one.job_id, one.number).unlink(missing_ok=True)
        lost.append(one.begin)
    return lost
