"""Show how a Job gets on while the local scheduler waits for it.

On a terminal one line that is redrawn: a bar for pretrain, a spinner and the log's last line for the other stages.
Anywhere else plain lines: one per 10 s for pretrain, the log itself for the other stages.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from pipeline.config.schema import Config
from pipeline.plan.sizes import tokens_per_step
from pipeline.run.folder import Run
from pipeline.run.records import Record, json_line, number, tokens_per_second, whole
from pipeline.status.tail import Tail
from pipeline.units import duration, short

PLAIN_SECONDS = 10.0  # between two plain lines of pretrain
REMEMBERED_LINES = 20  # of metrics.jsonl, for the median speed


class JobProgress:
    """The progress of one Job: `with JobProgress(...) as progress`, then `progress.update()` every 0.2 s or so.

    `job` is a record of jobs.json: stage, and log as a path inside the Run. Each update reads only what was added to
    metrics.jsonl and to the log since the last; a missing or torn file shows as no news.
    """

    def __init__(self, run: Run, config: Config, job: Mapping[str, Any], console: Console) -> None:
        self.stage = str(job.get("stage", ""))
        self.pretrain = self.stage == "pretrain"
        self.metrics = Tail(run.metrics, at_end=True)
        self.log = Tail(run.root / str(job["log"])) if job.get("log") else None
        self.rows: list[Record] = []
        self.config = config
        self.display: _Live | _Plain = _Live(self, console) if is_lively(console) else _Plain(self, console)

    def __enter__(self) -> JobProgress:
        self.display.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.update()
        self.display.finish()

    def update(self) -> None:
        """Read what is new and show it. Never raises for what the files hold, nor for a closed terminal."""
        lines = self.log.lines() if self.log else []
        if self.pretrain:
            new = [
                row for line in self.metrics.lines() if (row := json_line(line)) and whole(row.get("step")) is not None
            ]
            self.rows = [*self.rows, *new][-REMEMBERED_LINES:]
        with suppress(OSError):
            self.display.show(lines)

    @property
    def step(self) -> int | None:
        """The last step that metrics.jsonl tells of since this Job started."""
        return whole(self.rows[-1]["step"]) if self.rows else None

    def words(self) -> list[str]:
        """Return loss, speed and time left, as far as they are known."""
        if not self.rows:
            return []
        parts = []
        if (loss := number(self.rows[-1].get("loss"))) is not None:
            parts.append(f"loss {loss:.2f}")
        if speed := tokens_per_second(self.rows):
            remaining = max(0, self.config.pretrain.max_steps - (self.step or 0))
            parts += [f"{short(speed)} tokens/s", f"{duration(remaining * tokens_per_step(self.config) / speed)} left"]
        return parts


def is_lively(console: Console) -> bool:
    """Tell whether a line may be redrawn: on a terminal that can, and where nobody asked for plain text."""
    asked_plain = any(os.environ.get(name) for name in ("NO_COLOR", "CI"))
    return console.is_terminal and not console.is_dumb_terminal and not asked_plain


class _Plain:
    """Lines that a log file or a screen reader can take."""

    def __init__(self, job: JobProgress, console: Console) -> None:
        self.job, self.console = job, console
        self.next_line = 0.0
        self.shown: int | None = None

    def start(self) -> None:
        pass

    def show(self, lines: list[str]) -> None:
        if not self.job.pretrain:
            for line in lines:
                self._print(line)
        elif time.monotonic() >= self.next_line:
            self._print_step()

    def finish(self) -> None:
        with suppress(OSError):
            if self.job.pretrain:
                self._print_step()
            elif self.job.log:
                for line in self.job.log.unfinished():
                    self._print(line)

    def _print_step(self) -> None:
        if self.job.step is None or self.job.step == self.shown:
            return
        self.shown, self.next_line = self.job.step, time.monotonic() + PLAIN_SECONDS
        step = f"step {self.job.step}/{self.job.config.pretrain.max_steps}"
        self._print("  ".join(["pretrain", step, *self.job.words()]))

    def _print(self, line: str) -> None:
        self.console.print(line, soft_wrap=True)


class _Live:
    """One line at the bottom of a terminal. It is redrawn by update() alone: no thread beside the training."""

    def __init__(self, job: JobProgress, console: Console) -> None:
        self.job = job
        self.last_line = "starting"
        columns: list[ProgressColumn] = [
            SpinnerColumn(finished_text=Text("✓", "green")),
            TextColumn("{task.description}", style="bold", markup=False),
        ]
        if job.pretrain:
            columns.append(_Bar(bar_width=24))
        # The rest of the line is cut where the terminal ends; a wrapped line could not be redrawn.
        columns.append(_Words(table_column=Column(no_wrap=True, overflow="ellipsis")))
        self.progress = Progress(*columns, console=console, auto_refresh=False, transient=not job.pretrain)
        total = job.config.pretrain.max_steps if job.pretrain else None
        self.task = self.progress.add_task(job.stage, total=total, words="starting")

    def start(self) -> None:
        with suppress(OSError):
            self.progress.start()

    def show(self, lines: list[str]) -> None:
        said = [text for line in lines if (text := Text.from_ansi(line.replace("\r", "\n")).plain.strip())]
        if said:
            self.last_line = said[-1].splitlines()[-1]
        words = self.last_line
        if (step := self.job.step) is not None:
            words = "  ".join([f"{step}/{self.job.config.pretrain.max_steps}", *self.job.words()])
        self.progress.update(self.task, completed=step or 0, words=words)
        self.progress.refresh()

    def finish(self) -> None:
        with suppress(OSError):
            self.progress.stop()


class _Bar(BarColumn):
    """The bar, once there is something to measure."""

    def render(self, task: Task) -> Any:
        return super().render(task) if task.completed else Text("")


class _Words(ProgressColumn):
    """What is known at this moment, as plain text: a log line may hold anything."""

    def render(self, task: Task) -> Text:
        return Text(str(task.fields["words"]), "cyan" if task.completed else "dim", no_wrap=True, overflow="ellipsis")
