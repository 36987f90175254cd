"""The Job ledger: one file for each Job at Slurm, `jobs/NNNNNN.json`, whoever submits it.

A person's `submit`, an attempt that queues its successor and one that has checkpoints evaluated write here at the same
time, on different machines. So each entry is a file of its own, whose number is taken by O_EXCL before sbatch is
called; its token is in the Job's comment, by which a Job is found whose id was not heard.
"""

from __future__ import annotations

import os
import pwd
import time
from typing import Any

from pipeline.errors import StorageError
from pipeline.run.folder import Run
from pipeline.run.records import JobRecord, Record, read_record

TRIES = 1000


def run_id(run: Run) -> str:
    """Return the id by which Slurm's queue is asked for the Jobs of this very Run."""
    return str(read_record(run.record).get("id", run.name))


def token_prefix(id_: str) -> str:
    """Return what the comments of a Run's Jobs begin with."""
    return f"pipeline:{id_}:"


def this_user() -> str:
    """Return the user's name as squeue prints it; empty where this machine knows no name for the number."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return ""


def read_ledger(run: Run) -> list[JobRecord]:
    """Return all entries in the order of submission; those of version 0.1.0 first."""
    records = (JobRecord.read(path) for path in sorted(run.job_records.glob("[0-9]*.json")))
    return [*_old_records(run), *(record for record in records if record)]


def entry_of(run: Run, job_id: str) -> JobRecord | None:
    """Return the newest entry with this id; of a task of a Job array the array's."""
    whole = job_id.partition("_")[0]
    return next((record for record in reversed(read_ledger(run)) if record.job_id == whole), None)


def reserve(run: Run, **about: Any) -> JobRecord:
    """Make a new entry, under the next free number, without a job id yet."""
    run.job_records.mkdir(exist_ok=True)
    last = max((int(path.stem) for path in run.job_records.glob("[0-9]*.json")), default=0)
    for number in range(last + 1, last + TRIES):
        try:
            os.close(os.open(run.job_record(number), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        except FileExistsError:
            continue
        record = JobRecord(number=number, submitted=time.time(), user=this_user(), **about)
        record = record.but(token=f"{token_prefix(run_id(run))}{record.kind}.{number:06d}")
        record.write(run.job_record(number))
        return record
    raise StorageError(f"{run.job_records}: no free number for a Job among the next {TRIES}")


def keep(run: Run, record: JobRecord) -> JobRecord:
    """Write an entry again. Not to the disk at once: after a power loss the queue is asked for our tokens instead."""
    if record.number:
        record.write(run.job_record(record.number), durable=False)
    return record


def drop(run: Run, record: JobRecord) -> None:
    """Take an entry back: Slurm has refused the Job."""
    if record.number:
        run.job_record(record.number).unlink(missing_ok=True)


def _old_records(run: Run) -> list[JobRecord]:
    """Read jobs.json and evaluations/ as version 0.1.0 wrote them."""
    jobs = read_record(run.jobs)
    entries: list[Record] = []
    if jobs.get("scheduler") == "slurm" and isinstance(jobs.get("jobs"), list):
        times: dict[str, int] = {}
        for entry in jobs["jobs"]:
            if not isinstance(entry, dict) or not entry.get("job_id"):
                continue
            name = str(entry.get("name") or entry.get("stage"))
            entries.append(
                entry | {"role": "chain", "token": f"{token_prefix(run_id(run))}{name}.{times.get(name, 0)}"}
            )
            times[name] = times.get(name, 0) + 1
    for path in sorted(run.evaluations.glob("[0-9]*.json")):
        entry = read_record(path)
        if entry.get("job_id"):
            entries.append(entry | {"role": "beside", "closed": bool(entry.get("ended"))})
    return [record for entry in entries if (record := _old_record(entry))]


def _old_record(entry: Record) -> JobRecord | None:
    kept = {key: entry[key] for key in JobRecord.model_fields if entry.get(key) is not None} | {"number": 0}
    try:
        return JobRecord.model_validate(kept | {"job_id": str(entry["job_id"])})
    except ValueError:
        return None


def is_on_slurm(run: Run) -> bool:
    """Tell whether the Run's Jobs are Slurm's, and not this machine's scheduler's."""
    return run.job_records.is_dir() or read_record(run.jobs).get("scheduler") == "slurm"
