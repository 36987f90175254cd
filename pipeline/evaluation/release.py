"""Which checkpoint of a Run is the released one: a pointer, and a record of who moved it, when and why."""

from __future__ import annotations

import os
import time
from typing import Any

from pipeline.errors import NotReadyError, UserError
from pipeline.evaluation.scoring import manifest_hash
from pipeline.files import append_line, write_json
from pipeline.run.folder import Run
from pipeline.run.records import Record, read_record, read_records, read_scores, whole
from pipeline.run.steps import MANIFEST, PINNED


def promote(run: Run, step: int, why: str) -> Record:
    """Make the checkpoint of a step the released one, and keep it from retention; return what was recorded."""
    if not (run.checkpoint(step) / MANIFEST).is_file():
        steps = ", ".join(map(str, run.checkpoint_steps())) or "none"
        raise UserError(f"{run.name}: no checkpoint of step {step}; there are: {steps}")
    scores = {score.benchmark: score.score for score in read_scores(run) if score.step == step}
    return _point(run, "promote", step, why, scores=scores)


def rollback(run: Run, why: str) -> Record:
    """Release again what was released before the last change; return what was recorded."""
    history = _stack(run)
    if len(history) < 2:
        raise NotReadyError(f"{run.name}: nothing was released before, so there is nothing to go back to")
    before = history[-2]
    step = before["step"]
    if not (run.checkpoint(step) / MANIFEST).is_file():
        raise NotReadyError(f"{run.checkpoint(step)}: the checkpoint that was released before is gone; promote another")
    if before.get("sha256") != manifest_hash(run, step):
        raise NotReadyError(f"{run.checkpoint(step)}: holds other weights than it was released with; promote another")
    return _point(run, "rollback", step, why, scores=before.get("scores"))


def released(run: Run) -> int | None:
    """Return the step that is released; None where none is."""
    return whole(read_record(run.released).get("step"))


def _point(run: Run, action: str, step: int, why: str, **details: Any) -> Record:
    """Write the record first and the pointer after it: the pointer never names what no record tells of."""
    record = {"action": action, "step": step, "checkpoint": run.checkpoint(step).name}
    record |= {"sha256": manifest_hash(run, step), "by": os.environ.get("USER", str(os.getuid()))}
    record |= {"time": time.time(), "why": why} | details
    (run.checkpoint(step) / PINNED).touch()  # retention leaves it alone from here on
    append_line(run.releases, record)
    write_json(run.released, record)
    run.event(action, step=step, by=record["by"], reason=why)
    return record


def _stack(run: Run) -> list[Record]:
    """Return the releases that lie below each other: each rollback takes one away."""
    stack: list[Record] = []
    for record in read_records(run.releases):
        if whole(record.get("step")) is None:
            continue
        if record.get("action") != "rollback":
            stack.append(record)
        elif stack:
            stack.pop()
    return stack
