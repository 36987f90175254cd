"""From the words of a command line to a Run whose chain is done."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pipeline.cluster import open_cluster
from pipeline.complete import is_complete
from pipeline.config import Config
from pipeline.config_load import load_config, load_run_config
from pipeline.errors import EXIT_DONE, EXIT_INTERRUPTED, UserError
from pipeline.hints import command, shown
from pipeline.local import run_chain
from pipeline.owner import owned
from pipeline.plan import STAGES, Plan, make_plan
from pipeline.run import Run
from pipeline.status import read_status
from pipeline.status_view import print_status
from pipeline.submit import PROJECT, check_config, prepare, run_of

DEFAULT_CONFIG = PROJECT / "configs" / "tiny.yaml"


@dataclass(frozen=True)
class Request:
    """What a person asked for: a checked Config, its Run and its Plan."""

    config: Config
    run: Run
    plan: Plan


def request(words: Sequence[str], cluster: str | None, only: str | None) -> Request:
    """Read `[CONFIG or RUN] [key.path=value ...]`; all mistakes come to light here, before anything is written."""
    if only is not None and only not in STAGES:
        raise UserError(f"--only {only}: no such stage; the stages are {', '.join(STAGES)}")
    words = list(words)
    path = Path(words.pop(0)) if words and _is_path(words[0]) else DEFAULT_CONFIG
    if surplus := [word for word in words if "=" not in word]:
        raise UserError(
            f"{surplus[0]}: after the config only key.path=value is understood, such as pretrain.max_steps=500"
        )
    config = _load(path, words)
    run = run_of(config)
    check_config(run, config)
    plan = make_plan(config, open_cluster(cluster, sys.executable), run)
    if only is not None:
        plan = replace(plan, jobs=[job for job in plan.jobs if job.stage == only])
    return Request(config, run, plan)


def _is_path(word: str) -> bool:
    return "=" not in word or Path(word).exists()


def _load(path: Path, overrides: list[str]) -> Config:
    if path.is_dir():
        run = Run.open(path)
        if not overrides:
            return load_run_config(run.config)
        return load_config(run.config, overrides)
    return load_config(path, overrides)


def submit(request: Request, console: Console) -> int:
    """Make the Run's folder, run what is missing, write the report, say what came out."""
    run, config, plan = request.run, request.config, request.plan
    if all(is_complete(run, config, job.stage) for job in plan.jobs) and run.report.is_file():
        console.print(f"[bold]{run.name}[/]: everything is complete already")
        print_status(read_status(run), console)
        return EXIT_DONE
    with owned(run.control / "scheduler.json", f"Run {run.name}"):  # before anything that a first call may be reading
        prepare(run, config, plan)
        console.print(f"Run [bold]{run.name}[/] in {shown(run.root)}: {' → '.join(job.stage for job in plan.jobs)}")
        code = run_chain(run, config, plan, console)
    if code != EXIT_INTERRUPTED:
        _report(run, console)
    if code == EXIT_DONE:
        print_status(read_status(run), console)
    return code


def _report(run: Run, console: Console) -> None:
    """Write the report; a chain of hours must not end as a failure because a picture could not be drawn."""
    from pipeline.report import write_report

    try:
        write_report(run)
    except Exception as error:
        console.print(f"the report could not be written: {error}. Try again with:\n  {command('report', run.root)}")


def print_plan(request: Request, console: Console) -> None:
    """Print the Plan for a person: derived values, Jobs, literal command lines, launch files."""
    plan, run = request.plan, request.run
    console.print(f"Run [bold]{run.name}[/] in {shown(run.root)}, scheduler {plan.scheduler}", soft_wrap=True)
    derived = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for what, value in plan.derived.items():
        derived.add_row(what, value)
    console.print(derived)
    table = Table("job", "stage", "after", "ranks", "time limit", "state", box=None, padding=(0, 2, 0, 0))
    for job in plan.jobs:
        state = "complete" if is_complete(run, request.config, job.stage) else "to do"
        table.add_row(job.job_id, job.stage, ", ".join(job.after) or "-", str(job.ranks), job.time, state)
    console.print(table)
    for job in plan.jobs:
        console.print(" ".join(job.command), soft_wrap=True, markup=False)
    for name, text in plan.files.items():
        console.print(f"\n{shown(run.root / name)}", soft_wrap=True, markup=False, style="bold")
        console.print(text.rstrip(), soft_wrap=True, markup=False)
