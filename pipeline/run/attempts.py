"""The attempts of a Run: how each began, as a file that the host writes, and how it ended."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.files import write_json
from pipeline.run.decision import Attempt
from pipeline.run.folder import Run
from pipeline.run.records import number, read_record, whole
from pipeline.run.verdict import LOST, WARNED_EARLY, read_verdict


@dataclass(frozen=True)
class Beginning:
    """What the host knew when an attempt began."""

    job_id: str
    number: int
    stage: str
    nodes: list[str]
    before: int  # newest checkpoint's step, -1 where there is none
    time: float  # unix s
    part: str = ""  # of the Stage's work: phase, and the task of a Job array: encode/3/8
    deadline: float | None = None  # unix s, of a stage that leaves in time by itself
    dead: list[str] | None = None  # attempts (JOB.ATTEMPT) whose claims may be followed

    def write(self, run: Run) -> None:
        record = {"stage": self.stage, "part": self.part, "nodes": self.nodes, "before": self.before, "time": self.time}
        if self.dead is not None:
            record |= {"deadline": self.deadline, "dead": self.dead}
        write_json(run.beginning(self.job_id, self.number), record)


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


def read_beginnings(run: Run, stage: str | None = None, part: str | None = None) -> list[Beginning]:
    """Return how all attempts, or those of one Stage, or of a part of its work, began; oldest first."""
    found = []
    for path in run.beginning("0", 0).parent.glob("*.begin"):
        job_id, _, number_ = path.stem.rpartition(".")
        record = read_record(path)
        if not number_.isdigit() or (stage is not None and record.get("stage") != stage):
            continue
        if part is not None and record.get("part", "") != part:
            continue
        nodes = record.get("nodes")
        found.append(
            Beginning(
                job_id, int(number_), str(record.get("stage")), nodes if isinstance(nodes, list) else [],
                _step(record.get("before")), number(record.get("time")) or 0.0, str(record.get("part", "")),
                number(record.get("deadline")),
            )
        )  # fmt: skip
    return sorted(found, key=lambda beginning: (beginning.time, beginning.job_id, beginning.number))


def read_attempts(run: Run, stage: str, part: str = "") -> list[Attempt]:
    """Return the attempts of a Stage, or a part of its work, that have ended, oldest first.

    One that left no verdict ended when the next began: it was killed with all that could have written one.
    """
    beginnings = read_beginnings(run, stage, part)
    attempts = []
    for position, beginning in enumerate(beginnings):
        following = beginnings[position + 1] if position + 1 < len(beginnings) else None
        record = read_record(run.verdict(beginning.job_id, beginning.number))
        if not record and following is None:
            continue  # it runs
        ended = number(record.get("time")) or (following.time if following else beginning.time)
        after = whole(record.get("after"))
        if after is None:
            after = following.before if following else progress(run, stage, part)
        attempts.append(
            Attempt(
                beginning.job_id, beginning.number, str(record.get("verdict", LOST)), str(record.get("reason", "")),
                beginning.before, after, len(beginning.nodes) or 1, max(0.0, ended - beginning.time),
                record.get("warned") == WARNED_EARLY, ended, blamed=record.get("nodes") or [],
                sure=bool(record.get("sure", record.get("nodes"))), names=beginning.nodes,
            )
        )  # fmt: skip
    return attempts


def settle(run: Run, beginning: Beginning, verdict: dict[str, Any], warned: str | None) -> Attempt:
    """Write into an attempt's verdict what only the host knows, and return the whole."""
    after = progress(run, beginning.stage, beginning.part)
    record = verdict | {"stage": beginning.stage, "before": beginning.before, "after": after, "warned": warned}
    record.setdefault("began", beginning.time)
    record.setdefault("time", time.time())
    write_json(run.verdict(beginning.job_id, beginning.number), record)
    return Attempt(
        beginning.job_id, beginning.number, str(record["verdict"]), str(record["reason"]), beginning.before, after,
        len(beginning.nodes) or 1, time.time() - beginning.time, warned == WARNED_EARLY,
        blamed=record.get("nodes") or [], sure=bool(record.get("sure", record.get("nodes"))), names=beginning.nodes,
    )  # fmt: skip


def read_beginning(run: Run, job_id: str, number_: int) -> Beginning | None:
    """Return how one attempt began, None where its host wrote nothing."""
    return next((b for b in read_beginnings(run) if (b.job_id, b.number) == (job_id, number_)), None)


def settle_lost(run: Run, stage: str, now: str, number_: int, part: str = "") -> list[Beginning]:
    """Give those earlier attempts that left no verdict one, so that they count; return them."""
    lost = []
    for beginning in read_beginnings(run, stage, part):
        if (beginning.job_id, beginning.number) == (now, number_):
            continue
        path: Path = run.verdict(beginning.job_id, beginning.number)
        if path.is_file():
            continue
        record = read_verdict(run, beginning.job_id, beginning.number)
        reason = f"no process was left to say how it ended; it ran on {', '.join(beginning.nodes) or 'unknown nodes'}"
        if record["verdict"] == "crash":
            # Its last sign of life; what came after was waiting for nodes.
            until = number(read_record(run.ledger(beginning.job_id, beginning.number)).get("until"))
            record = {"verdict": LOST, "reason": reason, "step": None, "time": until or beginning.time}
        settle(run, beginning, record, None)
        run.warned(beginning.job_id, beginning.number).unlink(missing_ok=True)
        lost.append(beginning)
    return lost


def _step(value: Any) -> int:
    step = whole(value)
    return -1 if step is None else step
