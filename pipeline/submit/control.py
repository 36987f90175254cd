"""What a person may ask of a Run that is under way: stop, save, cancel."""

from __future__ import annotations

import os
import signal

from pipeline.errors import NotReadyError, UserError
from pipeline.hints import command, shown
from pipeline.run.folder import Run
from pipeline.run.job_ledger import is_on_slurm
from pipeline.run.owner import is_alive
from pipeline.run.place import place_of
from pipeline.run.records import read_record
from pipeline.status.read import read_state
from pipeline.submit.queue import RunJobs
from pipeline.submit.run_folder import read_cluster


def stop(run: Run) -> str:
    """Ask a Run to save and end; Jobs of ours that wait are cancelled, others see the file when they start."""
    _check_own(run, "stop")
    _touch(run, "stop")
    run.event("stop wanted", user=os.environ.get("USER", str(os.getuid())))
    if not is_on_slurm(run):
        return f"{run.name} saves and stops at its next step. Go on later with:\n  {command('resume', run.root)}"
    try:
        jobs = _jobs(run)
        alive = jobs.alive()
        waiting = jobs.cancel(queued for queued in alive if queued.waits)
    except UserError as error:  # no answer, or a team mate's jobs, say
        told = f"{run.name} saves and stops at its next step; Jobs that wait end when they start"
        return f"{told} ({str(error).splitlines()[0]}). Go on later with:\n  {command('resume', run.root)}"
    running = any(not queued.waits for queued in alive)
    told = f"{run.name} saves and stops at its next step." if running else f"{run.name}: none of its Jobs runs."
    told += f" Cancelled what waited: {', '.join(waiting)}." if waiting else ""
    return f"{told} Go on later with:\n  {command('resume', run.root)}"


def cancel(run: Run) -> str:
    """Cancel all Jobs of a Run, dependants first, so that none starts because another has ended."""
    _check_own(run, "cancel")
    if not is_on_slurm(run):
        return _cancel_here(run)
    jobs = _jobs(run)
    alive = [queued for queued in jobs.alive() if queued.record.job_id]
    if not alive:
        raise NotReadyError(f"{run.name}: none of its Jobs waits or runs")
    _touch(run, "stop")
    jobs.cancel(alive)
    return _cancelled(run, [(queued.record.kind, queued.job_id) for queued in alive])


def _cancel_here(run: Run) -> str:
    jobs = [job for job in read_state(run).jobs if job.state in ("pending", "running")]
    if not jobs:
        raise NotReadyError(f"{run.name}: none of its Jobs waits or runs")
    _touch(run, "stop")
    _end_local_scheduler(run)
    return _cancelled(run, [(job.name, job.job_id) for job in jobs])


def _cancelled(run: Run, jobs: list[tuple[str, str]]) -> str:
    run.event("cancel", user=os.environ.get("USER", str(os.getuid())), jobs=[job_id for _, job_id in jobs])
    names = ", ".join(f"{name} ({job_id})" for name, job_id in jobs)
    return f"cancelled {names}. Go on from the newest checkpoint with:\n  {command('resume', run.root)}"


def _jobs(run: Run) -> RunJobs:
    """Return the Run's own Jobs at Slurm: a job id that somebody else was given since is not among them."""
    cluster = read_cluster(run)
    return RunJobs(run, cluster, cluster.slurm())


def save(run: Run) -> str:
    """Ask a Run that trains for a checkpoint now."""
    _check_own(run, "save")
    state = read_state(run).state
    if state != "running":
        raise NotReadyError(f"{run.name} is {state}: nothing trains that could save")
    _touch(run, "save")
    return f"{run.name} saves at its next step; {run.save} is gone when the checkpoint is there"


def _check_own(run: Run, verb: str) -> None:
    """Refuse to ask anything of a copy that was never submitted: the Jobs in its records are the original's."""
    place = place_of(run)
    if place.copied and place.former:
        raise NotReadyError(
            f"{run.root} is a copy of {shown(place.former)} and has no Jobs of its own yet. For the original's write:\n"
            f"  {command(verb, place.former)}"
        )


def _touch(run: Run, name: str) -> None:
    path = run.control / name
    try:
        run.control.mkdir(exist_ok=True)
        path.touch()
    except OSError as error:
        raise NotReadyError(f"{path}: {error.strerror}; ask the Run's owner for write permission") from error


def _end_local_scheduler(run: Run) -> None:
    """Have the local scheduler of this machine end its Job, as Ctrl-C does."""
    record = read_record(run.jobs)
    if is_alive(record) and isinstance(record.get("pid"), int):
        os.kill(record["pid"], signal.SIGTERM)
