"""What `window` shows: the holes of the schedule, and the evaluate Jobs that would be submitted for them now."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from pipeline.config.load import load_run_config
from pipeline.errors import UserError
from pipeline.evaluation.backfill import Backfill, startup_seconds
from pipeline.run.folder import Run
from pipeline.run.job_ledger import is_on_slurm
from pipeline.submit.run_folder import read_cluster
from pipeline.units import duration


def look(run: Run) -> dict[str, Any]:
    """Return holes, what is left to score, and the sizes chosen for it. Nothing is submitted."""
    if not is_on_slurm(run) and not run.cluster.is_file():
        raise UserError(f"{run.root}: this Run is not on a Slurm cluster, so it has no schedule with holes")
    config, cluster = load_run_config(run.config), read_cluster(run)
    backfill = Backfill(run, config, cluster, cluster.slurm())
    left, holes = backfill.left(), backfill.holes()
    sizes = backfill.sizes(left.seconds, config.evaluate.most_jobs) if left else []
    return {
        "holes": [hole.to_json() for hole in holes],
        "seconds_left": left.seconds,
        "startup_seconds": startup_seconds(run),
        "sizes": [size.to_json() for size in sizes],
    }


def print_window(found: dict[str, Any], console: Console) -> None:
    """Print it for a person."""
    if found["holes"]:
        table = Table("node", "GPUs", "CPUs", "idle for", "until", box=None, padding=(0, 2, 0, 0), header_style="dim")
        for hole in found["holes"]:
            span = "?" if hole["seconds"] is None else duration(hole["seconds"])
            table.add_row(hole["node"], str(hole["gpus"]), str(hole["cpus"]), span, hole["until"])
        console.print(table)
    else:
        console.print("nothing is idle that can be seen")
    left, startup = duration(found["seconds_left"]), duration(found["startup_seconds"])
    console.print(f"Units left: about {left}; start-up of a Job: {startup}")
    for size in found["sizes"]:
        flags = f"--time={size['minutes']} --time-min={size['least']}"
        console.print(f"{flags}  {size['why']}", soft_wrap=True)
    if not found["sizes"]:
        console.print("no evaluate Job is needed")
