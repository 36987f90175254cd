"""From what a person asked for to a Run whose chain is done."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.prompt import Confirm
from rich.text import Text

from pipeline.cluster.remote import There
from pipeline.cluster.secret_env import left_behind
from pipeline.config.schema import Config
from pipeline.errors import EXIT_DONE, EXIT_INTERRUPTED, NotReadyError, UserError
from pipeline.hints import command, shown
from pipeline.plan.jobs import ALONE, gpu_hours
from pipeline.run.complete import check_state, is_complete
from pipeline.run.folder import Run
from pipeline.run.owner import owned
from pipeline.run.place import Place, place_of, settle_place
from pipeline.status.read import read_state, read_status
from pipeline.status.view import print_status
from pipeline.submit.ask import Request, check_fit
from pipeline.submit.local import run_chain
from pipeline.submit.run_folder import prepare
from pipeline.submit.to_slurm import Submission, submit_chain


def submit(
    request: Request, console: Console, *, yes: bool = False, resume: bool = False, as_json: bool = False
) -> int:
    """Make the Run's folder and run what is missing: here, with a report at the end, or by handing it to Slurm.

    `resume` takes back a person's stop. `as_json`: where the Run is elsewhere, its status is printed there as JSON.
    """
    run, config, plan = request.run, request.config, request.plan
    if request.there:
        return _submit_elsewhere(request, request.there, resume, ["--yes"] * yes + ["--json"] * as_json)
    check_state(run, config, [job.stage for job in plan.jobs])
    if request.cluster.scheduler == "slurm":
        return _submit_to_slurm(request, console, yes, resume)
    if all(is_complete(run, config, job.stage) for job in plan.jobs) and run.report.is_file():
        console.print(Text.assemble((run.name, "bold"), ": everything is complete already"))
        print_status(read_status(run), console)
        return EXIT_DONE
    _take_up(run, config, resume)
    with owned(run.control / "scheduler.json", f"Run {run.name}"):  # before anything that a first call may be reading
        prepare(run, config, plan)
        stages = " → ".join(job.stage for job in plan.jobs)
        console.print(Text.assemble("Run ", (run.name, "bold"), f" in {shown(run.root)}: {stages}"))
        code = run_chain(run, config, plan, console)
    if any(job.stage in ALONE for job in plan.jobs):
        return code  # nothing of the Run has changed
    if code != EXIT_INTERRUPTED:
        _report(run, console)
    if code == EXIT_DONE:
        print_status(read_status(run), console)
    return code


def _submit_elsewhere(request: Request, there: There, resume: bool, words: list[str]) -> int:
    """Have the same submitted where the Run is."""
    there.keep_pointer(request.config)
    undo = there.run.stop if resume else None
    return there.submit(request.config, "submit", request.only_word, *words, undo=undo)


def _submit_to_slurm(request: Request, console: Console, yes: bool, resume: bool) -> int:
    """Hand to Slurm what is missing of a Run."""
    run, config, cluster, plan = request.run, request.config, request.cluster, request.plan
    if all(is_complete(run, config, job.stage) for job in plan.jobs):
        console.print(Text.assemble((run.name, "bold"), ": everything is complete already"))
        _report(run, console)
        print_status(read_status(run), console)
        return EXIT_DONE
    check_fit(request, console)
    if said := left_behind(cluster):
        console.print(said, soft_wrap=True)
    _confirm_cost(request, console, yes)
    place = _take_up(run, config, resume)
    with owned(run.control / "scheduler.json", f"Run {run.name}"):
        working = read_state(run, config).state in ("running", "pending")
        is_new = prepare(run, config, plan, cluster, keep_code=working) or place.copied
        title = Text.assemble("Run ", (run.name, "bold"), f" in {shown(run.root)}, on {cluster.name}")
        console.print(title, soft_wrap=True)
        return submit_chain(run, config, cluster, plan, console, is_new=is_new)


def _take_up(run: Run, config: Config, resume: bool) -> Place:
    """Let the Run be where it is now; refuse while Jobs or processes are at work that name the folder of before.

    `resume` takes back a person's stop.
    """
    place = place_of(run)
    jobs = read_state(run, config).jobs if place.moved else []
    if left := [job.job_id for job in jobs if job.state in ("pending", "running")]:
        raise NotReadyError(
            f"{run.root}: moved here from {place.former}, and its Jobs {', '.join(left)} still name that folder. "
            f"Cancel them, then resume:\n  {command('cancel', run.root)}\n  {command('resume', run.root)}"
        )
    try:
        settled = settle_place(run)
        if resume:
            run.stop.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{run.root}: cannot write there: {error.strerror or error}") from error
    return settled


def _confirm_cost(request: Request, console: Console, yes: bool) -> None:
    """Ask before a Plan is submitted that may use more GPU-hours than the cluster file lets pass unasked."""
    limit, hours = request.cluster.confirm_gpu_hours, gpu_hours(request.config, request.cluster, request.plan)
    if limit is None or hours <= limit or yes:
        return
    told = f"this Plan may use up to {hours:,.1f} GPU-hours, and confirm_gpu_hours is {limit:,.1f}"
    if not (console.is_terminal and sys.stdin.isatty() and Confirm.ask(f"{told}. Submit it?", console=console)):
        raise UserError(f"{told}; to submit it add: --yes")


def _report(run: Run, console: Console) -> None:
    """Write the report; a chain of hours must not end as a failure because a picture could not be drawn."""
    from pipeline.report.write import write_report

    try:
        write_report(run)
    except Exception as error:
        console.print(f"the report could not be written: {error}. Try again with:\n  {command('report', run.root)}")


def test_plan(request: Request, console: Console) -> int:
    """Ask Slurm whether it would take each Job of the Plan; nothing is written or queued."""
    if request.there:
        return request.there.submit(request.config, "submit", "--test", request.only_word)
    if request.cluster.scheduler != "slurm":
        raise UserError("--test asks a Slurm; add --cluster FILE")
    check_fit(request, console)
    submission = Submission(request.run, request.config, request.cluster, request.plan, request.cluster.slurm())
    submission.test(lambda text: console.print(text, soft_wrap=True))
    return EXIT_DONE
