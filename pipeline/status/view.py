"""A Status for a terminal: a small table, a few lines, and what to do next."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipeline.evaluation.score_table import make_table
from pipeline.hints import command, shown
from pipeline.run.goodput import KINDS
from pipeline.slurm.states import lacks_nodes
from pipeline.status.read import JobStatus, Status
from pipeline.units import duration, short

MOST_SCORES = 12  # steps in the table of Scores
MOST_NAMES = 8  # of Jobs in a sentence
FEWEST_TOGETHER = 4  # Segments that are shown as one line
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
    console.print(title)
    if status.reason:
        _line(console, "", status.reason)
    if status.jobs:
        console.print()
        console.print(_jobs_table(status))
    console.print()
    _print_progress(status, console)
    _print_time(status, console)
    _print_scores(status, console)
    _print_queue(status, console)
    for label, text in next_commands(status):
        _line(console, label, text)
    if source:
        _line(console, "source", status.source, "dim")


def next_commands(status: Status) -> list[tuple[str, str]]:
    """Return (what, command line) of what a person may want to do in this state."""
    root = status.run.root
    follow, resume = ("follow", command("logs", "-f", root)), ("go on", command("resume", root))
    if status.state in ("running", "pending"):
        short = any(lacks_nodes(job.waits_for) for job in status.jobs)
        again = [("choose", f"{command('resume', root)}    (anew which bad nodes may be used)")] if short else []
        return [follow, ("stop", command("stop", root)), *again]
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
    console.print(Text.assemble((f"{label:<9}", "dim"), (text, style)), soft_wrap=True)


def _jobs_table(status: Status) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    segmented, repeated = any(job.segment for job in status.jobs), any(job.attempt for job in status.jobs)
    segment, attempt = ["segment"] * segmented, ["attempt"] * repeated
    for title in ("stage", *segment, "job", *attempt, "state", "time", ""):
        table.add_column(title, no_wrap=title != "", justify="right" if title == "time" else "left")
    now = time.time()
    for group in _groups(status):
        first, last = group[0], group[-1]
        alone = len(group) == 1
        said = "" if first.reason and first.reason in status.reason else first.reason.split("\n")[0]  # once is enough
        table.add_row(
            first.name,
            *([_span(str(first.segment or ""), str(last.segment or ""))] if segmented else []),
            _span(first.job_id, last.job_id),
            *(["" if first.attempt is None or not alone else str(first.attempt)] if repeated else []),
            Text(first.state, STYLES[first.state]),
            duration(first.seconds(now)) if alone else "",
            Text(said or _place(first), "dim"),
        )
    return table


def _groups(status: Status) -> list[list[JobStatus]]:
    """Return the Jobs that are shown, Segments in a row that all wait or all are done as one.

    Of a Job that was submitted again, the last counts.
    """
    jobs = list({(job.name, job.segment): job for job in status.jobs}.values())
    groups: list[list[JobStatus]] = []
    for job in jobs:
        alike = groups and job.segment and all(_kind(job) == _kind(other) for other in groups[-1])
        if alike and job.state in ("pending", "completed", "stopped"):
            groups[-1].append(job)
        else:
            groups.append([job])
    return [
        part for group in groups for part in ([group] if len(group) >= FEWEST_TOGETHER else [[job] for job in group])
    ]


def _kind(job: JobStatus) -> tuple[str, str, str]:
    return job.stage, job.state, job.reason


def _span(first: str, last: str) -> str:
    return first if first == last else f"{first}-{last}"


def _place(job: JobStatus) -> str:
    """Say where a Job runs, and for how long it may."""
    left = f"{duration(job.time_left)} until its time limit" if job.time_left is not None else ""
    return ", ".join(part for part in (f"on {job.nodes}" if job.nodes and job.state == "running" else "", left) if part)


def _print_queue(status: Status, console: Console) -> None:
    """Print what is not queued, what decides when a Job that waits starts, and the nodes that none starts on."""
    _print_missing(status, console)
    names = {job.job_id: f"{job.stage} {job.segment}" if job.segment else job.name for job in status.jobs}
    for job_id, priority in status.queue.priorities.items():
        _line(console, "priority", f"{names.get(job_id, job_id)}  {priority.words()}")
    for account, share in status.queue.fair_share.items():
        _line(console, "share", f"{share:.2f} in account {account}: 1 for one that has used little, 0 for far too much")
    for node in status.queue.bad_nodes:
        until = time.strftime("%d %b %H:%M", time.localtime(node.until))
        said = f" (only {node.by} says so, and Jobs may use it)" if node.by else ""
        _line(console, "bad node", f"{node.name} until {until}: {node.reason}{said}")


def _print_missing(status: Status, console: Console) -> None:
    """Print which Jobs of a living chain are not at Slurm: a limit, or a lost answer, may have kept them out."""
    names = status.not_submitted
    if names:
        listed = ", ".join(names[:MOST_NAMES]) + (", …" if len(names) > MOST_NAMES else "")
        what = "1 Job of the chain is" if len(names) == 1 else f"{len(names)} Jobs of the chain are"
        again = command("resume", status.run.root)
        _line(console, "missing", f"{what} not submitted: {listed}. Submit what is missing: {again}", "yellow")


def _print_progress(status: Status, console: Console) -> None:
    if status.step is None or not status.max_steps:
        return
    parts = [f"step {status.step:,}/{status.max_steps:,}"]
    if status.loss is not None:
        parts.append(f"loss {status.loss:.3f}")
    if status.tokens_per_s:
        parts.append(f"{short(status.tokens_per_s)} tokens/s")
    if status.eta_s is not None:
        waits = "" if status.state == "running" else " of training, once it runs"
        parts.append(f"{duration(status.eta_s)} left{waits}")
    if status.goodput is not None:
        parts.append(f"goodput {status.goodput:.0%}")
    line = Table.grid(padding=(0, 2, 0, 0))
    bar = ProgressBar(total=status.max_steps, completed=status.step, width=24)
    line.add_row(Text("pretrain", "dim"), *([bar] if console.is_terminal else []), "  ".join(parts))
    console.print(line)


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
    """Print steps x Scores with their errors; the first, the best and the newest where there are many steps."""
    if not status.scores:
        return
    found = make_table(status.scores)
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("score (* best)", justify="right")
    for name, unit in zip(found.benchmarks, found.units, strict=True):
        table.add_column(f"{name.replace('_', ' ')}" + (f", {unit}" if unit != "bits/byte" else ""), justify="right")
    table.add_column("")
    rows = found.rows
    if len(rows) > MOST_SCORES:
        rows = [row for row in rows[:-MOST_SCORES] if row == rows[0] or any(c and c.best for c in row[1])]
        rows += found.rows[-MOST_SCORES + len(rows) :]
    for step, cells in rows:
        texts = [Text(str(cell) if cell else "", "bold" if cell and cell.best else "") for cell in cells]
        marks = ["newest"] * (step == found.newest) + ["released"] * (step == status.released)
        table.add_row(f"step {step:,}", *texts, Text(", ".join(marks), "dim"))
    console.print(table)
    if comparison := beats(status):
        _line(console, "", f"{comparison[1]} {comparison[2]:.3f}: {compared(*comparison)}")
    console.print()
