"""From the words of a command line to what a person asks for: a checked Config, its Run, its Plan; and that shown."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeline.cluster.limits import Finding, misfits
from pipeline.cluster.load import open_cluster
from pipeline.cluster.remote import There, there_of
from pipeline.cluster.schema import Cluster
from pipeline.cluster.secret_env import check_secrets
from pipeline.config.errors import Mistake, dotted
from pipeline.config.load import load_config, load_run_config, place_of_key
from pipeline.config.named_paths import Problem
from pipeline.config.paths import resolve_paths
from pipeline.config.paths_there import resolve_there
from pipeline.config.schema import Config
from pipeline.config.yaml12 import KeyPath
from pipeline.config.yaml12 import Place as Written
from pipeline.errors import EXIT_DONE, UserError
from pipeline.hints import command, shown
from pipeline.image.container import check_container
from pipeline.plan.jobs import ALONE, STAGES, Measured, Plan, make_plan
from pipeline.run.attempts import all_attempts, newest_step
from pipeline.run.complete import is_complete
from pipeline.run.folder import Run
from pipeline.run.goodput import read_split
from pipeline.run.place import place_of
from pipeline.run.records import read_metrics, tokens_per_second
from pipeline.run.saves import slowest_save
from pipeline.submit.run_folder import PROJECT, check_config, config_of, is_parcel, read_cluster, run_of

DEFAULT_CONFIG = PROJECT / "configs" / "tiny.yaml"


@dataclass(frozen=True)
class Request:
    """What a person asked for: a checked Config, its Run, where it runs, and its Plan."""

    config: Config
    run: Run
    cluster: Cluster
    plan: Plan
    there: There | None = None  # where the Run is, if that is elsewhere
    only: str | None = None
    config_file: Path | None = None  # what was read, for messages
    overrides: tuple[str, ...] = ()
    cluster_file: Path | None = None

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
    path, overrides = _path_and_overrides(words)
    file = path / "config.yaml" if path.is_dir() else path
    return Request(config, run, place, plan, there, only, file, tuple(overrides), Path(cluster or run.cluster))


def read_config(words: Sequence[str], where: Callable[[Run], Cluster]) -> Config:
    """Read `[CONFIG or RUN] [key.path=value ...]`; ConfigError with all mistakes at once.

    `where` tells the cluster of a Run: what the config names is looked for there.
    """
    path, overrides = _path_and_overrides(words)
    if surplus := [word for word in overrides if "=" not in word]:
        raise UserError(
            f"{surplus[0]}: after the config only key.path=value is understood, such as pretrain.max_steps=500"
        )
    return _load(path, overrides, where)


def _path_and_overrides(words: Sequence[str]) -> tuple[Path, list[str]]:
    named = bool(words) and _is_path(words[0])
    return (Path(words[0]), list(words[1:])) if named else (DEFAULT_CONFIG, list(words))


def _cluster_of(run: Run, name: str | None) -> Cluster:
    """Return the cluster that was named, or that an existing Run was planned for."""
    if name is None and run.cluster.is_file():
        return read_cluster(run)
    return open_cluster(name, sys.executable)


def measured(run: Run) -> Measured:
    """Return what earlier attempts of a Run tell about the rest of it."""
    split, starts = read_split(run), len(all_attempts(run, "pretrain"))
    return Measured(
        step=max(0, newest_step(run)),
        tokens_per_s=tokens_per_second(read_metrics(run)),
        save_seconds=slowest_save(run),
        stall_seconds=slowest_save(run, "stall_seconds"),
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


def check_fit(request: Request, console: Console) -> None:
    """Say what the cluster's partitions and accounts will not take; UserError where no Job could start."""
    if request.cluster.scheduler != "slurm" or request.there:
        return
    stages = {job.stage for job in request.plan.jobs}
    found = [f for f in misfits(request.cluster, request.config, request.cluster.slurm()) if f.stage in stages]
    for finding in found:
        if finding.state == "warn":
            console.print(f"warning: {_mistake(request, finding)}", style="yellow", soft_wrap=True)
    if mistakes := [_mistake(request, finding) for finding in found if finding.state == "fail"]:
        raise UserError("Slurm would refuse this, or never start it:\n" + "\n".join(dict.fromkeys(map(str, mistakes))))


def _mistake(request: Request, finding: Finding) -> Mistake:
    """Name the file and line of what does not fit: of the config or of the cluster file."""
    config_file, cluster_file = request.config_file or request.run.config, request.cluster_file or request.run.cluster
    written_at = place_of_key
    if is_parcel(config_file.parent):  # whose lines are not those that a person wrote
        written_at = _nowhere
    problem = f"{finding.found}; {finding.remedy}"
    own = finding.key in ("time", "nodes")
    if own or finding.key in getattr(request.config, finding.stage).sbatch:
        key: KeyPath = (finding.stage, finding.key) if own else (finding.stage, "sbatch", finding.key)
        return Mistake(written_at(config_file, request.overrides, key), dotted(key), problem)
    of_stage = finding.key in getattr(request.cluster.stages, finding.stage).sbatch
    key = ("stages", finding.stage, "sbatch", finding.key) if of_stage else ("sbatch", finding.key)
    return Mistake(written_at(cluster_file, (), key), dotted(key), problem)


def _nowhere(path: Path, overrides: Sequence[str], key: KeyPath) -> Written:
    return Written("")


def show_plan(request: Request, console: Console, *, as_json: bool = False) -> int:
    """Print the Plan for a person; have it printed, as JSON too, where the Run is."""
    if request.there:
        words = ["plan", "--json"] if as_json else ["submit", "--dry-run", request.only_word]
        return request.there.submit(request.config, *words)
    print_plan(request, console)
    check_fit(request, console)
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
    title = Text.assemble("Run ", (run.name, "bold"), f" in {shown(run.root)}, scheduler {plan.scheduler}")
    console.print(title, soft_wrap=True)
    print_derived(plan.derived, console)
    done = {stage: is_complete(run, request.config, stage) for stage in {job.stage for job in plan.jobs}}
    rows = [
        (job.name, ", ".join(job.after) or "-", str(job.nodes), str(job.ranks), job.time, _to_do(done[job.stage]))
        for job in plan.jobs
    ]
    lines = [*_columns([("job", "after", "nodes", "ranks", "time limit", "state"), *rows])]
    lines += [shlex.join(job.command) for job in plan.jobs]
    console.print("\n".join(lines), soft_wrap=True)
    for name, text in plan.files.items():
        console.print(f"\n{shown(run.root / name)}", soft_wrap=True, style="bold")
        console.print(text.rstrip(), soft_wrap=True)


def _to_do(complete: bool) -> str:
    return "complete" if complete else "to do"


def _columns(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Lay out rows one below the other: a Table of rich's takes a millisecond a row, and there may be hundreds."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
