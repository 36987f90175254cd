"""One owner at a time: a record on disk that names a process, and a way for a former owner to notice that it is none.

Claims are numbered files beside the record, `.owner.json.000007`, each made by link(), which is atomic on every file
system, also where flock is not there. The highest number is the owner: who wants to follow a dead owner N links N + 1,
and only one can. `owner.json` itself is a copy for people and for `status`.

A process of another host cannot be looked at. What a person has called (`owned`) therefore gives signs of life: it
touches its claim while it lives. A claim that was not touched for two minutes is free. Its age is read from the file
system's own clock, and it is watched before it is believed, so that no clock of a host counts.

`python -m pipeline.run.owner take RUN JOB ATTEMPT` is for a job script that has asked its scheduler and knows that
whoever stands there is gone, or soon will be: it hands the Run to that attempt, whatever the record says.
`python -m pipeline.run.owner free RUN` is for a person who knows that the call that holds a Run is gone.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pipeline.errors import EXIT_DONE, EXIT_USAGE, NotReadyError
from pipeline.files import fsync_folder, write_json
from pipeline.hints import python_word, shown

Record = dict[str, Any]

BEAT_SECONDS = 10.0  # between two signs of life
EXPIRY_SECONDS = 120.0  # without one, after which a claim may be free
WATCH_SECONDS = 2.5 * BEAT_SECONDS  # for which it is watched then: times of files may come from clocks that differ


class NotOwnerError(Exception):
    """This process owned a Run and no longer does: another one has taken over, so nothing may be written any more."""


def process_start(pid: int) -> str | None:
    """Return when a process of this machine started (clock ticks since boot), None if it is gone or a zombie.

    With the pid it names a process for good: pids are used again, pairs of pid and start are not.
    """
    try:
        # The command's name, in parentheses, may hold anything; the fields after it are fixed (proc(5)).
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def this_process() -> Record:
    """Describe this process so that another one can tell later whether it still lives."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "started": process_start(os.getpid())}


def is_alive(record: Record | None) -> bool:
    """Tell whether the process of a record lives; one of another host is taken to live, since nobody can look."""
    if not isinstance(record, dict) or not record.get("pid"):
        return False
    if record.get("host") != socket.gethostname():
        return True
    start = process_start(int(record["pid"]))
    return start is not None and start == record.get("started", start)


def current(path: Path) -> tuple[int, Record | None]:
    """Return the highest claim's number and record; None where nobody owns, 0 where nobody ever has."""
    numbers = claim_numbers(path)
    claim = claim_path(path, numbers[-1]) if numbers else path
    try:
        record = json.loads(claim.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        record = None
    owned_by = record if isinstance(record, dict) and not record.get("released") else None
    return (numbers[-1] if numbers else 0), owned_by


def try_to_own(path: Path, **details: Any) -> Record | None:
    """Make this process the owner of `path`; if another one stands there, change nothing and return its record.

    A place that was reserved for a job and attempt (see `take`) is free for the process whose `details` name the same.
    """
    mine = this_process() | details | {"token": secrets.token_hex(8)}
    while True:
        number, holder = current(path)
        if holder is not None and is_mine(holder, os.getpid()):
            return None
        alive = is_alive(holder) and not _has_expired(claim_path(path, number), holder)
        if alive or _reserved_for_another(holder, details):
            return holder
        if link_claim(path, number + 1, mine):
            write_json(path, mine)
            return None


def take(path: Path, job_id: str, attempt: int) -> Record | None:
    """Reserve `path` for an attempt of a Job, whoever owns it; return the record that stood there."""
    reservation = {"host": None, "pid": None, "job_id": job_id, "attempt": attempt, "token": secrets.token_hex(8)}
    while True:
        number, holder = current(path)
        if link_claim(path, number + 1, reservation):
            write_json(path, reservation)
            return holder


def check_owner(path: Path) -> None:
    """Raise NotOwnerError unless this process owns `path` now."""
    _, holder = current(path)
    if not is_mine(holder, os.getpid()):
        raise NotOwnerError(f"{path}: now owned by {describe(holder)}; nothing more is written here")


def check_held(path: Path, what: str) -> None:
    """Raise NotReadyError where `owned` no longer holds `path`: this process stood still, and another took over."""
    try:
        check_owner(path)
    except NotOwnerError:
        holder = describe(current(path)[1])
        raise NotReadyError(
            f"{what} was taken over by {holder}, since this call stood still for more than {EXPIRY_SECONDS:.0f} s; "
            "it changes nothing more. See what the other one has done, then give the command again if it is needed"
        ) from None


def belongs_to(path: Path, job_id: str, attempt: int) -> bool:
    """Tell whether the owner is this attempt of a Job, or nobody; what ranks beside rank 0 ask."""
    _, holder = current(path)
    return holder is None or (holder.get("job_id"), holder.get("attempt")) == (job_id, attempt)


def disown(path: Path) -> None:
    """Give `path` up if this process owns it."""
    number, holder = current(path)
    if is_mine(holder, os.getpid()):
        path.unlink(missing_ok=True)
        if number:  # the number stays: it must never be given out again
            write_json(claim_path(path, number), {"released": True})


@contextmanager
def owned(path: Path, what: str, wait_seconds: float = 0, **details: Any) -> Iterator[None]:
    """Own `path` inside the body, with signs of life; wait up to `wait_seconds` for a former owner on its way out."""
    deadline = time.monotonic() + wait_seconds
    while (holder := try_to_own(path, beats=True, **details)) is not None:
        if time.monotonic() >= deadline:
            raise NotReadyError(f"{what} is held by {describe(holder)} ({path}). {_remedy(path, holder)}")
        time.sleep(0.2)
    done = threading.Event()
    threading.Thread(target=_beat, args=(claim_path(path, current(path)[0]), done), daemon=True).start()
    try:
        yield
    finally:
        done.set()
        disown(path)


def _beat(claim: Path, done: threading.Event) -> None:
    while not done.wait(BEAT_SECONDS):
        with suppress(OSError):  # a disk that is away for a while; a claim that another one has followed
            os.utime(claim)


def _has_expired(claim: Path, holder: Record | None) -> bool:
    """Tell whether a holder on another host, which gives signs of life, has given none for too long."""
    if holder is None or not holder.get("beats") or holder.get("host") == socket.gethostname():
        return False
    try:
        last = claim.stat().st_mtime
        if abs(time_of_files(claim) - last) < EXPIRY_SECONDS:
            return False
        time.sleep(WATCH_SECONDS)
        return claim.stat().st_mtime == last
    except OSError:  # it has just been followed, or nothing can be written here
        return False


def time_of_files(neighbour: Path) -> float:
    """Return what a file gets for a time that is written now, beside `neighbour`."""
    probe = neighbour.with_name(f"{neighbour.name}.{secrets.token_hex(4)}.{os.getpid()}.tmp")
    try:
        probe.touch()
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


def _remedy(path: Path, holder: Record) -> str:
    """Say what to do about a holder that stands in a person's way."""
    if holder.get("host") == socket.gethostname():
        return f"Wait until it has ended, or end it: kill {holder['pid']}"
    free = f"{python_word()} -m pipeline.run.owner free {shlex.quote(shown(path.parent.parent))}"
    expires = f" (it is free {EXPIRY_SECONDS:.0f} s after its last sign of life)" if holder.get("beats") else ""
    return f"If that process is gone{expires}, and nothing but it was at work, free it now:\n  {free}"


def describe(holder: Record | None) -> str:
    """Name an owner for a message."""
    if holder is None:
        return "nobody"
    if not holder.get("pid"):
        return f"job {holder.get('job_id')}, attempt {holder.get('attempt')}, for which it is reserved"
    return f"process {holder['pid']} on {holder.get('host')}"


def is_mine(holder: Record | None, pid: int) -> bool:
    me = {"host": socket.gethostname(), "pid": pid, "started": process_start(pid)}
    return holder is not None and all(holder.get(key) == value for key, value in me.items())


def _reserved_for_another(holder: Record | None, details: Record) -> bool:
    if holder is None or holder.get("pid") or "job_id" not in holder:
        return False
    return any(holder.get(key) != details.get(key) for key in ("job_id", "attempt"))


def claim_path(path: Path, number: int) -> Path:
    return path.with_name(f".{path.name}.{number:06d}")


def claim_numbers(path: Path) -> list[int]:
    """List the numbers of all claims, ascending. On NFS a folder's listing is fresh after a link() of one's own."""
    prefix = f".{path.name}."
    names = (entry.name for entry in path.parent.iterdir()) if path.parent.is_dir() else ()
    ends = (name[len(prefix) :] for name in names if name.startswith(prefix))
    return sorted(int(end) for end in ends if end.isdigit())


def link_claim(path: Path, number: int, record: Record) -> bool:
    """Make claim `number`, whole from its first moment on; False if someone else has this number or a higher one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{record['token']}.tmp")
    write_json(draft, record)
    claim = claim_path(path, number)
    try:
        os.link(draft, claim)
    except FileExistsError:
        return False
    finally:
        draft.unlink(missing_ok=True)
    # Whoever looked long ago may link a number that was used and cleared away since: then a higher one is there.
    numbers = claim_numbers(path)
    if numbers[-1] != number:
        claim.unlink(missing_ok=True)
        return False
    for old in numbers[:-1]:
        claim_path(path, old).unlink(missing_ok=True)
    fsync_folder(path.parent)
    return True


def free(path: Path) -> Record | None:
    """Take away the claim of a holder that is not known to live; return what stood there. NotReadyError if it lives."""
    number, holder = current(path)
    if holder is not None and holder.get("host") == socket.gethostname() and is_alive(holder):
        raise NotReadyError(f"{path}: {describe(holder)} is alive. {_remedy(path, holder)}")
    if holder is not None and link_claim(path, number + 1, {"released": True, "token": secrets.token_hex(8)}):
        path.unlink(missing_ok=True)
    return holder


def main(argv: list[str]) -> int:
    """Hand a Run to an attempt, or free it of a person's call; say from whom it was taken."""
    if len(argv) == 2 and argv[0] == "free":
        try:
            former = free(Path(argv[1]) / "control" / "scheduler.json")
        except NotReadyError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code
        print(f"{argv[1]} is free; before, it was held by {describe(former)}", file=sys.stderr)
        return EXIT_DONE
    if len(argv) != 4 or argv[0] != "take" or not argv[3].isdigit():
        print("usage: python -m pipeline.run.owner take RUN JOB ATTEMPT | free RUN", file=sys.stderr)
        return EXIT_USAGE
    former = take(Path(argv[1]) / "control" / "owner.json", argv[2], int(argv[3]))
    print(f"owner: job {argv[2]}, attempt {argv[3]}; before: {describe(former)}", file=sys.stderr)
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
