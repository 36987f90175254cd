"""From the words of a command line to a Run whose chain is done."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from rich.console import Console
from rich.prompt import Confirm
from rich.table import Table

from pipeline.cluster.load import open_cluster
from pipeline.cluster.remote import There, there_of
from pipeline.cluster.schema import Cluster
from pipeline.cluster.secret_env import check_secrets
from pipeline.config.load import load_config, load_run_config
from pipeline.config.named_paths import Problem
from pipeline.config.paths import resolve_paths
from pipeline.config.paths_there import resolve_there
from pipeline.config.schema import Config
from pipeline.errors import EXIT_DONE, EXIT_INTERRUPTED, NotReadyError, UserError
from pipeline.hints import command, shown
from pipeline.image.container import check_container
from pipeline.plan.jobs import ALONE, STAGES, Measured, Plan, gpu_hours, make_plan
from pipeline.run.attempts import all_attempts, newest_step
from pipeline.run.complete import check_state, is_complete
from pipeline.run.folder import Run
from pipeline.run.goodput import read_split
from pipeline.run.owner import owned
from pipeline.run.place import Place, place_of, settle_place
from pipeline.run.records import number, read_metrics, read_records, tokens_per_second
from pipeline.status.read import read_state, read_status
from pipeline.status.view import print_status
from pipeline.submit.local import run_chain
from pipeline.submit.run_folder import PROJECT, check_config, config_of, is_parcel, prepare, read_cluster, run_of
from pipeline.submit.to_slurm import Submission, submit_chain

DEFAULT_CONFIG = PROJECT / "configs" / "tiny.yaml"
SAVES_MEASURED = 20  # the last ones, of which the slowest counts


@dataclass(frozen=True)
class Request:
    """What a person asked for: a checked Config, its Run, where it runs, and its Plan."""

    config: Config
    run: Run
    cluster: Cluster
    plan: Plan
    there: There | None = None  # where the Run is, if that is elsewhere
    only: str | None = None

    @property
    def only_word(self) -> str:
        """Return the option that asks for the one stage elsewhere, empty for the whole chain."""
        return f"--only={self.only}" if self.only else ""


def request(words: Sequence[str], cluster: str | None, only: str | None) -> Request:
    """Read `[CONFIG or RUN] [key.path=value ...]`; all mistakes come to light here, before anything is written."""
    if only is not None and only not in (*ALONE, *STAGES):
        raise UserError(f"--only {only}: no such stage; the stages are {', '.join((*ALONE, *STAGES))}")
    where = cache(lambda run: _cluster_of(run, cluster))
    config = read_config(words, where)
    run = run_of(config)
    place = where(run)
    there = there_of(run, place)
    if there is None:
        check_config(run, config)
        check_container(place)
        check_secrets(place)
        plan = make_plan(config, place, run, measured(run) if place.scheduler == "slurm" else None)
    else:  # what was measured is over there, and so is the Plan that counts
        plan = make_plan(config, place, there.run)
    if only is not None:
        plan = replace(plan, jobs=[job for job in plan.alone + plan.jobs if job.stage == only])
    return Request(config, run, place, plan, there, only)


def read_config(words: Sequence[str], where: Callable[[Run], Cluster]) -> Config:
    """Read `[CONFIG or RUN] [key.path=value ...]`; ConfigError with all mistakes at once.

    `where` tells the cluster of a Run: what the config names is looked for there.
    """
    words = list(words)
    path = Path(words.pop(0)) if words and _is_path(words[0]) else DEFAULT_CONFIG
    if surplus := [word for word in words if "=" not in word]:
        raise UserError(
            f"{surplus[0]}: after the config only key.path=value is understood, such as pretrain.max_steps=500"
        )
    return _load(path, words, where)


def _cluster_of(run: Run, name: str | None) -> Cluster:
    """Return the cluster that was named, or that an existing Run was planned for."""
    if name is None and run.cluster.is_file():
        return read_cluster(run)
    return open_cluster(name, sys.executable)


def measured(run: Run) -> Measured:
    """Return what earlier attempts of a Run tell about the rest of it."""
    saves = [event for event in read_records(run.events) if event.get("event") == "save"][-SAVES_MEASURED:]
    split, starts = read_split(run), len(all_attempts(run, "pretrain"))

    def slowest(key: str) -> float | None:
        return max((value for save in saves if (value := number(save.get(key))) is not None), default=None)

    return Measured(
        step=max(0, newest_step(run)),
        tokens_per_s=tokens_per_second(read_metrics(run)),
        save_seconds=slowest("seconds"),
        stall_seconds=slowest("stall_seconds"),
        restart_seconds=split.startup / starts if split and starts else None,
    )


def _is_path(word: str) -> bool:
    return "=" not in word or Path(word).exists()


def _load(path: Path, overrides: list[str], where: Callable[[Run], Cluster]) -> Config:
    if is_parcel(path):  # config and code as they were sent here, to be submitted
        return load_run_config(path / "config.yaml")
    run = _named_run(path)

    def resolve(config: Config, folder: Path) -> tuple[Config, list[Problem]]:
        place = where(run_of(config))
        return resolve_there(config, place.slurm()) if place.login else resolve_paths(config, folder)

    def resolve_of_run(config: Config, folder: Path) -> tuple[Config, list[Problem]]:
        return resolve(_of_run(run, config, overrides) if run else config, folder)

    if run is None:
        return load_config(path, overrides, resolve=resolve)
    if there := there_of(run):
        there.fetch_config()
    if not overrides:
        return config_of(run, load_run_config(run.config))
    return load_config(run.config, overrides, resolve=resolve_of_run)


def _named_run(path: Path) -> Run | None:
    """Return the Run whose folder, or whose config.yaml, a person has named; None for a config that lies elsewhere."""
    folder = path if path.is_dir() else path.parent
    is_run = path.name == "config.yaml" and any((folder / name).is_file() for name in ("run.json", "cluster.yaml"))
    return Run(place_of(Run.open(folder)).root) if path.is_dir() or is_run else None


def _of_run(run: Run, config: Config, overrides: list[str]) -> Config:
    """Return the Config of the named Run; of one beside it where an override gives a name."""
    keys = _keys(overrides)
    if "runs_dir" in keys:
        return config
    if "name" not in keys:
        return config_of(run, config)
    beside = run_of(config).root.parent == run.root.parent
    return config if beside else config.model_copy(update={"runs_dir": str(run.root.parent)})


def _keys(overrides: Sequence[str]) -> set[str]:
    return {text.partition("=")[0] for text in overrides}


def check_resume(run: Run, overrides: Sequence[str]) -> None:
    """Refuse overrides by which another Run would be meant than the one to go on with."""
    if keys := _keys(overrides) & {"name", "runs_dir"}:
        raise UserError(
            f"{min(keys)}: it would be another Run, and resume goes on with {shown(run.root)}; "
            f"for a new one from the same config write:\n  {command('submit', run.root, *overrides)}"
        )


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
        console.print(f"[bold]{run.name}[/]: everything is complete already")
        print_status(read_status(run), console)
        return EXIT_DONE
    _take_up(run, config, resume)
    with owned(run.control / "scheduler.json", f"Run {run.name}"):  # before anything that a first call may be reading
        prepare(run, config, plan)
        console.print(f"Run [bold]{run.name}[/] in {shown(run.root)}: {' → '.join(job.stage for job in plan.jobs)}")
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
        console.print(f"[bold]{run.name}[/]: everything is complete already")
        _report(run, console)
        print_status(read_status(run), console)
        return EXIT_DONE
    _confirm_cost(request, console, yes)
    place = _take_up(run, config, resume)
    with owned(run.control / "scheduler.json", f"Run {run.name}"):
        working = read_state(run, config).state in ("running", "pending")
        is_new = prepare(run, config, plan, cluster, keep_code=working) or place.copied
        console.print(f"Run [bold]{run.name}[/] in {shown(run.root)}, on {cluster.name}", soft_wrap=True)
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
    submission = Submission(request.run, request.config, request.cluster, request.plan, request.cluster.slurm())
    submission.test(lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True))
    return EXIT_DONE


def show_plan(request: Request, console: Console, *, as_json: bool = False) -> int:
    """Print the Plan for a person; have it printed, as JSON too, where the Run is."""
    if request.there:
        words = ["plan", "--json"] if as_json else ["submit", "--dry-run", request.only_word]
        return request.there.submit(request.config, *words)
    print_plan(request, console)
    return EXIT_DONE


def print_derived(derived: dict[str, str], console: Console) -> None:
    """Print what was derived, each with its arithmetic."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for what, value in derived.items():
        table.add_row(what, value)
    console.print(table)


def print_plan(request: Request, console: Console) -> None:
    """Print the Plan for a person: derived values, Jobs, literal command lines, launch files."""
    plan, run = request.plan, request.run
    console.print(f"Run [bold]{run.name}[/] in {shown(run.root)}, scheduler {plan.scheduler}", soft_wrap=True)
    print_derived(plan.derived, console)
    table = Table("job", "after", "nodes", "ranks", "time limit", "state", box=None, padding=(0, 2, 0, 0))
    for job in plan.jobs:
        state = "complete" if is_complete(run, request.config, job.stage) else "to do"
        table.add_row(job.name, ", ".join(job.after) or "-", str(job.nodes), str(job.ranks), job.time, state)
    console.print(table)
    for job in plan.jobs:
        console.print(shlex.join(job.command), soft_wrap=True, markup=False, highlight=False)
    for name, text in plan.files.items():
        console.print(f"\n{shown(run.root / name)}", soft_wrap=True, markup=False, style="bold")
        console.print(text.rstrip(), soft_wrap=True, markup=False)
