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
    told = _stop_on_slurm(run) if is_on_slurm(run) else f"{run.name} saves and stops at its next step."
    return f"{told} Go on later with:\n  {command('resume', run.root)}"


def _stop_on_slurm(run: Run) -> str:
    try:
        jobs = _jobs_at_slurm(run)
        alive = jobs.alive()
        running = any(not queued.waits for queued in alive)
        told = f"{run.name} saves and stops at its next step." if running else f"{run.name}: none of its Jobs runs."
        waiting = jobs.cancel(queued for queued in alive if queued.waits)
        return f"{told} Cancelled what waited: {', '.join(waiting)}." if waiting else told
    except UserError as error:  # no answer, or a team mate's jobs
        return f"{run.name} stops. The jobs that wait end when they start ({str(error).splitlines()[0]})."


def cancel(run: Run) -> str:
    """Cancel all Jobs of a Run, dependants first, so that none starts because another has ended."""
    _check_own(run, "cancel")
    names = _cancel_at_slurm(run) if is_on_slurm(run) else _cancel_here(run)
    told = ", ".join(f"{name} ({job_id})" for job_id, name in names.items())
    return f"cancelled {told}. Go on from the newest checkpoint with:\n  {command('resume', run.root)}"


def _cancel_at_slurm(run: Run) -> dict[str, str]:
    """Cancel what lives at Slurm and is the Run's own; an id alone is never enough for that."""
    jobs = _jobs_at_slurm(run)
    alive = [queued for queued in jobs.alive() if queued.record.job_id and queued.job.answered]
    if not alive:
        raise NotReadyError(f"{run.name}: none of its Jobs waits or runs")
    _touch(run, "stop")
    jobs.cancel(alive)
    names = {queued.job_id: queued.record.kind for queued in alive}
    run.event("cancel", user=os.environ.get("USER", str(os.getuid())), jobs=list(names))
    return names


def _cancel_here(run: Run) -> dict[str, str]:
    jobs = [job for job in read_state(run).jobs if job.state in ("pending", "running")]
    if not jobs:
        raise NotReadyError(f"{run.name}: none of its Jobs waits or runs")
    _touch(run, "stop")
    _end_local_scheduler(run)
    names = {job.job_id: job.name for job in jobs}
    run.event("cancel", user=os.environ.get("USER", str(os.getuid())), jobs=list(names))
    return names


def _jobs_at_slurm(run: Run) -> RunJobs:
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
