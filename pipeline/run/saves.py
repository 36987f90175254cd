"""Which checkpoints a Run has saved, by its events, and whether they are still where training looks for them."""

from __future__ import annotations

import os
import shlex
import time
from typing import NamedTuple

from pipeline.errors import NotReadyError, StorageError
from pipeline.hints import command
from pipeline.run.attempts import all_attempts
from pipeline.run.folder import Run
from pipeline.run.records import number, read_records, whole
from pipeline.run.steps import step_folders

SAVES_MEASURED = 20  # the last ones, of which the slowest counts
BEGUN_ANEW = "begun anew"  # the event of a training that a person has let begin again


class Save(NamedTuple):
    """A checkpoint that was on disk once."""

    step: int
    time: float  # unix s
    source: str  # the file that tells of it


def last_save(run: Run) -> Save | None:
    """Return the last checkpoint that this training has saved; None where it has none, or was begun anew since."""
    last, anew = None, 0.0
    for event in read_records(run.events):
        at = number(event.get("time")) or 0.0
        if event.get("event") == BEGUN_ANEW:
            last, anew = None, at
        elif event.get("event") == "save" and (step := whole(event.get("step"))) is not None:
            last = Save(step, at, run.events.name)
    return last or _last_of_verdicts(run, anew)


def slowest_save(run: Run, key: str = "seconds") -> float | None:
    """Return the largest value of a key (s) among the last saves' events; None where no save was measured."""
    saves = [event for event in read_records(run.events) if event.get("event") == "save"][-SAVES_MEASURED:]
    return max((value for save in saves if (value := number(save.get(key))) is not None), default=None)


def _last_of_verdicts(run: Run, since: float) -> Save | None:
    """Look into what attempts have left: events are not synced, so a power cut may have taken them."""
    found = [
        Save(verdict.step_at_end, verdict.time, f"attempts/{one.name}")
        for one in all_attempts(run, "pretrain")
        if (verdict := one.verdict)
        and verdict.step_at_end is not None
        and verdict.step_at_end >= 0
        and verdict.time > since
    ]
    return found[-1] if found else None


def is_trained(run: Run) -> bool:
    """Tell whether training has saved anything: then tokens and tokenizer are bound to it."""
    return bool(step_folders(run.checkpoints)) or last_save(run) is not None


def check_checkpoints(run: Run) -> None:
    """Raise where checkpoints were saved and none is there: training never begins again by itself.

    StorageError where they are gone, NotReadyError where they lie behind a link that leads nowhere now.
    """
    if step_folders(run.checkpoints):
        return
    if run.anew.exists() or (save := last_save(run)) is None:
        return
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(save.time))
    known = f"{save.source} tells of one of step {save.step}, saved {when}"
    if run.checkpoints.is_symlink() and not run.checkpoints.exists():
        raise NotReadyError(
            f"{run.checkpoints} is a link to {os.readlink(run.checkpoints)}, which is not there, and {known}. "
            f"Mount that disk, or mend the link, then call again. {_remedy(run)}"
        )
    raise StorageError(
        f"{run.checkpoints}: no checkpoint is there, and {known}. Put the folder back (is its disk mounted?), "
        f"then call again. {_remedy(run)}"
    )


def _remedy(run: Run) -> str:
    return (
        "Training never begins again by itself; to have it begin at step 0 in this folder:\n"
        f"  touch {shlex.quote(str(run.anew))}\n  {command('resume', run.root)}"
    )


def begin_anew(run: Run) -> None:
    """Note that training begins with nothing, and do away with the wish for it; called by the Run's owner."""
    if run.anew.exists():
        run.event(BEGUN_ANEW, reason=f"{run.anew} was there, and no checkpoint")
        run.anew.unlink(missing_ok=True)
