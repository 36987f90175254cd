"""Show what the Jobs of a Run have written, and go on showing it."""

from __future__ import annotations

import os
import re
import time
from collections import deque
from pathlib import Path
from typing import TextIO

from pipeline.errors import NotReadyError, UserError
from pipeline.plan.jobs import ALONE, STAGES
from pipeline.run.folder import Run
from pipeline.run.job_ledger import is_on_slurm
from pipeline.status.read import read_state
from pipeline.status.tail import Tail
from pipeline.visible import visible

# Of an attempt, or of what Slurm itself had to say about a Job: before its script's first line and after its last.
LOG_NAME = re.compile(r"(?P<stage>[a-z_]+)-(?P<job_id>.+?)\.(?:(?P<attempt>\d+)|slurm)\.log")
POLL_SECONDS = 0.3
STATE_SECONDS = 1.0  # between looks at whether the Run goes on
SLURM_STATE_SECONDS = 10.0  # the same where a controller, which has others to serve, is asked for it


def log_files(run: Run, stage: str | None = None) -> list[Path]:
    """List the log files of a Run, or of one Stage, by Stage, Job and attempt."""
    try:
        paths = sorted(run.logs.glob("*.log"), key=_order)
    except OSError:
        return []
    return [path for path in paths if stage is None or path.name.startswith(f"{stage}-")]


def read_logs(run: Run, follow: bool, stage: str | None, lines: int | None, out: TextIO, *, raw: bool = False) -> None:
    """Write the logs of all attempts to `out`, only the last `lines` of each file if given.

    In visible characters, for a log holds whatever a text, a model or a library has said; as it is if `raw`.

    With `follow`, go on with what is added, new attempts too, until the Run neither runs nor waits. Where there are
    several files, a line names the one that follows. A reader that has gone away (a closed pipe) ends it quietly.
    """
    if stage is not None and stage not in (*ALONE, *STAGES):
        raise UserError(f"no stage {stage!r}; there are {', '.join((*ALONE, *STAGES))}")
    if not follow and not log_files(run, stage):
        raise NotReadyError(f"{run.root}: no log{f' of {stage}' if stage else ''} yet")
    try:
        printer = _Printer(run, stage, lines, out, raw)
        printer.show()
        if follow:
            _follow(run, printer)
        printer.finish()
        out.flush()
    except BrokenPipeError:
        # Or Python complains when it flushes the stream at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())


def _follow(run: Run, printer: _Printer) -> None:
    active = True
    seconds = SLURM_STATE_SECONDS if is_on_slurm(run) else STATE_SECONDS
    while active:
        deadline = time.monotonic() + seconds
        active = read_state(run).state in ("running", "pending")
        printer.show()  # after the look at the state: what a Run wrote before it ended is shown
        while active and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            printer.show()


class _Printer:
    """Where each file was read up to, and which one was shown last."""

    def __init__(self, run: Run, stage: str | None, lines: int | None, out: TextIO, raw: bool) -> None:
        self.run, self.stage, self.out, self.raw = run, stage, out, raw
        self.tails: dict[Path, Tail] = {}
        self.current: Path | None = None
        self.several = False
        self.first_lines = lines  # of the files that were there at the start, at the first look

    def show(self) -> None:
        """Write what is new in all files."""
        paths = log_files(self.run, self.stage)
        self.several = self.several or len(paths) > 1
        for path in paths:
            tail = self.tails.setdefault(path, Tail(path))
            if self.first_lines is None:
                while tail.grown:
                    self._write(path, tail.lines())
            else:
                last: deque[str] = deque(maxlen=self.first_lines)
                while tail.grown:
                    last.extend(tail.lines())
                self._write(path, list(last))
        self.first_lines = None
        self.out.flush()

    def finish(self) -> None:
        """Write last lines that have no line end."""
        for path, tail in self.tails.items():
            self._write(path, tail.unfinished())

    def _write(self, path: Path, lines: list[str]) -> None:
        if not lines:
            return
        if self.several and path != self.current:
            blank = "" if self.current is None else "\n"
            self.out.write(f"{blank}==> {visible(path.name)} <==\n")
        self.current = path
        self.out.write("\n".join(lines if self.raw else [visible(line.rstrip("\r")) for line in lines]) + "\n")


def _order(path: Path) -> tuple[int, list[tuple[int, str]], int, str]:
    """Sort by Stage in the order of the chain, then by job id and attempt as numbers."""
    match = LOG_NAME.fullmatch(path.name)
    if match is None:
        return len(STAGES), [], 0, path.name
    stage, pieces = match["stage"], re.split(r"(\d+)", match["job_id"])
    job = [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in pieces]
    attempt = int(match["attempt"] or -1)
    return STAGES.index(stage) if stage in STAGES else -1, job, attempt, path.name
