"""A Status for a terminal: a small table, a few lines, and what to do next."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipeline.goodput import KINDS
from pipeline.hints import command, shown
from pipeline.status import Status
from pipeline.units import duration, short

STYLES = {
    "planned": "dim",
    "pending": "dim",
    "running": "bold cyan",
    "stopped": "bold yellow",
    "failed": "bold red",
    "completed": "bold green",
}


def print_status(status: Status, console: Console, *, source: bool = False) -> None:
    """Print a Run's state, Jobs, progress, Scores, the command that comes next, and from what all this was read."""
    title = Text.assemble((status.run.name, "bold"), "  ", (status.state, STYLES[status.state]))
    console.print(title, highlight=False)
    if status.reason:
        _line(console, "", status.reason)
    if status.jobs:
        console.print()
        console.print(_jobs_table(status))
    console.print()
    _print_progress(status, console)
    _print_time(status, console)
    _print_scores(status, console)
    for label, text in next_commands(status):
        _line(console, label, text)
    if source:
        _line(console, "source", status.source, "dim")


def next_commands(status: Status) -> list[tuple[str, str]]:
    """Return (what, command line) of what a person may want to do in this state."""
    root = status.run.root
    follow, resume = ("follow", command("logs", "-f", root)), ("go on", command("resume", root))
    if status.state in ("running", "pending"):
        return [follow, ("stop", command("stop", root))]
    if status.state == "completed":
        return [
            ("report", shown(status.run.report)) if status.run.report.is_file() else ("report", command("report", root))
        ]
    if status.state == "planned":
        return [("start", command("resume", root))]
    failed = [("log", shown(root / job.log)) for job in status.jobs if job.state == "failed" and job.log]
    return [*failed, resume]


def beats(status: Status) -> tuple[float, str, float] | None:
    """Return (bits per byte of the newest checkpoint, best compressor, bits per byte of that), where all are known."""
    scores = [score for score in status.scores if score.benchmark == "bits_per_byte"]
    if not scores or not status.compressors:
        return None
    best = min(status.compressors, key=lambda name: status.compressors[name])
    return scores[-1].score, best, status.compressors[best]


def compared(score: float, name: str, other: float) -> str:
    """Say how many per cent fewer (or more) bits a Score is than a compressor needs."""
    share = 1 - score / other if other else 0.0
    return f"beats {name} by {share:.1%}" if share >= 0 else f"{-share:.1%} behind {name}"


def _line(console: Console, label: str, text: str, style: str = "") -> None:
    # soft_wrap: a command must stay one line, or it cannot be copied
    console.print(Text.assemble((f"{label:<9}", "dim"), (text, style)), highlight=False, soft_wrap=True)


def _jobs_table(status: Status) -> Table:
    jobs = status.jobs
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    segmented = any(job.segment for job in jobs)
    for title in ("stage", *(["segment"] if segmented else []), "job", "state", "time", ""):
        table.add_column(title, no_wrap=title != "", justify="right" if title == "time" else "left")
    now = time.time()
    for job in jobs:
        cells = [job.stage, *([str(job.segment)] if segmented else []), job.job_id]
        said = "" if job.reason and job.reason in status.reason else job.reason.split("\n")[0]  # once is enough
        state = Text(job.state, STYLES[job.state])
        table.add_row(*cells, state, duration(job.seconds(now)), Text(said, "dim"))
    return table


def _print_progress(status: Status, console: Console) -> None:
    if status.step is None or not status.max_steps:
        return
    parts = [f"step {status.step:,}/{status.max_steps:,}"]
    if status.loss is not None:
        parts.append(f"loss {status.loss:.3f}")
    if status.tokens_per_s:
        parts.append(f"{short(status.tokens_per_s)} tokens/s")
    if status.eta_s is not None:
        parts.append(f"{duration(status.eta_s)} left")
    if status.goodput is not None:
        parts.append(f"goodput {status.goodput:.0%}")
    line = Table.grid(padding=(0, 2, 0, 0))
    bar = ProgressBar(total=status.max_steps, completed=status.step, width=24)
    line.add_row(Text("pretrain", "dim"), *([bar] if console.is_terminal else []), "  ".join(parts))
    console.print(line, highlight=False)


def _print_time(status: Status, console: Console) -> None:
    """Print what the wall time of training went into, where it is known."""
    if status.time is None or status.time.wall <= 0:
        return
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("time")
    for kind in KINDS:
        table.add_column({"startup": "start-up"}.get(kind, kind), justify="right")
    seconds = [getattr(status.time, kind) for kind in KINDS]
    table.add_row(
        duration(status.time.wall), *[f"{value:.1f} s" if value < 60 else duration(value) for value in seconds]
    )
    table.add_row("", *[f"{value / status.time.wall:.1%}" for value in seconds], style="dim")
    console.print(table)
    console.print()


def _print_scores(status: Status, console: Console) -> None:
    comparison = beats(status)
    newest = [score for score in status.scores if score.benchmark == "bits_per_byte"][-1:]
    for score in status.scores:
        text = f"step {score.step:,}  {score.score:.3f} {score.unit}"
        if comparison and score in newest:
            text += f"  ({comparison[1]} {comparison[2]:.3f}: {compared(*comparison)})"
        _line(console, "score", text)
