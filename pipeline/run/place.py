"""Where a Run is: in the folder that a person names. Tells a moved Run from a copy, and gives a copy an id of its own.

run.json records the folder, and its inode, in which the Run was submitted last. Another folder with that record is

- the Run itself by another name (a link, a second mount): it is where the record says;
- a copy, if the recorded folder still holds this Run;
- the Run moved, if the recorded folder does not, and this one is the very folder by its inode;
- a copy, if it is not: where the original is by now cannot be known, and its Jobs are not this folder's.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.files import write_json
from pipeline.run.folder import Run
from pipeline.run.owner import owned
from pipeline.run.records import read_record

SETTLE_SECONDS = 10  # to wait for another call that settles the same copy


class Place(NamedTuple):
    """What run.json says about the folder that it lies in."""

    root: Path  # by which the Run's launch files and Jobs name it, if it has not moved
    id: str | None  # None where it has none yet, and for a copy, which has none of its own
    moved: bool = False
    copied: bool = False
    former: Path | None = None  # the folder of before, or the original's


def place_of(run: Run) -> Place:
    """Tell whether the Run in this folder has always been there, was moved there, or is a copy. Reads only."""
    record = read_record(run.record)
    run_id = str(record["id"]) if record.get("id") else None
    former = _recorded_folder(run, record)
    if former is None or former == run.root:
        return Place(run.root, run_id)
    if _same(former, run.root):
        return Place(former, run_id)
    if _holds(former, record) or _is_another_folder(run, record):
        return Place(run.root, None, copied=True, former=former)
    return Place(run.root, run_id, moved=True, former=former)


def settle_place(run: Run) -> Place:
    """Record that the Run is here from now on; a copy gets its own id first. Return what it was until now."""
    place = place_of(run)
    if place.copied:
        return _part(run)
    record = read_record(run.record)
    if record and (changed := record | here(Run(place.root))) != record:
        write_json(run.record, changed)
    if place.moved:
        run.event("moved", before=str(place.former), to=str(run.root))
    return place


def here(run: Run) -> dict[str, Any]:
    """Return what run.json records of the folder."""
    return {"folder": str(run.root), "inode": run.root.stat().st_ino}


def _part(run: Run) -> Place:
    """Make a Run of its own of a copy, by one call at a time. Its id comes last: a killed call is done again."""
    # The place of this lease is the folder's own: leases that came with the copy are not.
    lease = run.root / f".place-{hashlib.sha256(bytes(run.root)).hexdigest()[:8]}.json"
    with owned(lease, f"Run {run.name}", SETTLE_SECONDS):
        place, record = place_of(run), read_record(run.record)
        if not place.copied:
            return place
        former_id = str(record.get("id"))
        _set_aside(run, former_id)
        step = max(run.checkpoint_steps(), default=-1)
        lineage = {"copied_from": str(place.former), "copied_from_id": former_id, "copied_at_step": step}
        write_json(run.record, record | {"id": secrets.token_hex(6)} | here(run) | lineage)
        run.event("copied", **lineage)
    return place


def _set_aside(run: Run, former_id: str) -> None:
    """Move away what would let this Run touch, or wait for, the original's Jobs and processes."""
    aside = run.inherited(former_id)
    aside.mkdir(parents=True, exist_ok=True)
    for path in run.bound_to_jobs():
        if path.exists():
            path.rename(_free(aside / path.name))
    for claim in run.scores(0).parent.glob("*/*.d/.*.[0-9]*"):
        claim.unlink(missing_ok=True)


def _free(path: Path) -> Path:
    """Return `path`, or a name beside it where it is taken."""
    numbers = (path.with_name(f"{path.name}.{number}") for number in range(1, 1000))
    return next(candidate for candidate in (path, *numbers) if not candidate.exists())


def _recorded_folder(run: Run, record: dict[str, Any]) -> Path | None:
    """Return the folder that a Run was submitted in; of one of 0.1.0 its plan says it."""
    folder = record.get("folder") or read_record(run.plan).get("run")
    return Path(folder) if isinstance(folder, str) else None


def _same(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def _holds(folder: Path, record: dict[str, Any]) -> bool:
    """Tell whether a folder holds the Run of this record, or may well do, where it cannot be looked at."""
    try:
        (folder / "config.yaml").stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return read_record(Run(folder).record).get("id") == record.get("id")


def _is_another_folder(run: Run, record: dict[str, Any]) -> bool:
    return "inode" in record and record["inode"] != run.root.stat().st_ino
