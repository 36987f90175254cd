"""What Slurm says about a Job, read from squeue, scontrol or sacct into one shape."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from pipeline.slurm.arrays import count_states, names
from pipeline.slurm.states import ENDED, explain_reason, lacks_nodes, normal_state
from pipeline.units import duration

# Columns with a `|` after each and none of free text, so that no name can shift them.
COLUMNS = (
    "ArrayJobID:16|,JobArrayID:64|,State:24|,exit_code:12|,RestartCnt:8|,"
    "TimeLeft:20|,TimeLimit:20|,StartTime:32|,NodeList:4000|,Reason:200|"
)
SACCT_COLUMNS = "JobID,State,ExitCode,Timelimit,NodeList"
CLOCK = re.compile(r"(?:([0-9]+)-)?(?:([0-9]+):)?([0-9]+):([0-9]+)(?:\.[0-9]+)?")
NOTHING = {"", "(null)", "N/A", "None", "Unknown", "n/a", "None assigned"}
FIELD = re.compile(r"(?:^| )([A-Za-z][A-Za-z/:]*)=")
WHY_ENDED = {
    "cancelled": "by a person or the chain",
    "timeout": "ran into its time limit",
    "node_fail": "lost a node",
    "preempted": "made way for a Job of higher priority",
    "out_of_memory": "used more memory than it had asked for; raise mem, or lower micro_batch_size",
    "boot_fail": "its nodes did not start",
    "deadline": "could not end before its deadline",
}


@dataclass(frozen=True)
class SlurmJob:
    """One Job as Slurm sees it. `source` is the command that said so; times are seconds, `start` is Slurm's text."""

    job_id: str
    state: str
    source: str
    reason: str = ""
    nodes: str = ""
    time_left: int | None = None
    time_limit: int | None = None
    start: str | None = None
    restarts: int = 0
    exit_code: int = 0
    signal: int = 0
    answered: bool = True  # false: Slurm could not be asked, so an unknown Job may well be there
    excluded: str = ""  # nodes that it is kept off, where that may be why it waits
    tasks: dict[str, int] = field(default_factory=dict)  # of an array: how many are in which state

    @property
    def ended(self) -> bool:
        """Tell whether it will not run again."""
        return self.state in ENDED

    @property
    def success(self) -> bool:
        """Tell whether Slurm says that all went well; what counts in the end is what the stage left in the Run."""
        return (self.state, self.exit_code, self.signal) == ("completed", 0, 0)

    @property
    def stuck(self) -> bool:
        """Tell whether it waits for what will not come by itself."""
        return self.state == "requeue_hold" or (self.state == "pending" and explain_reason(self.reason).stuck)

    @property
    def lacks_nodes(self) -> bool:
        """Tell whether it waits because too few of the nodes that it may have are there, and not for its turn."""
        return self.state == "pending" and lacks_nodes(self.reason)

    def explain(self) -> str:
        """Say in plain words what it is doing or waiting for, or how it ended, and what to do."""
        if self.state == "requeue_hold":
            held = "held after a requeue: it needs an administrator or a release: scontrol release JOB"
            return held.replace("JOB", self.job_id)
        if self.state == "pending":
            words = explain_reason(self.reason).words.replace("JOB", self.job_id)
            if self.excluded:
                words = f"too few nodes are left without {self.excluded}, which it is kept off ({words})"
            return f"{words}; Slurm expects to start it at {self.start}" if self.start else words
        if self.state in ("running", "completing", "suspended", "requeued"):
            left = f", {duration(self.time_left)} left" if self.time_left is not None else ""
            return f"{self.state} on {self.nodes}{left}" if self.nodes else self.state
        if self.state.startswith("unknown"):
            return self.reason or "Slurm's word for its state is not known here"
        return self._end()

    def _end(self) -> str:
        if self.success:
            return "completed"
        code = f"exit code {self.exit_code}" if self.exit_code else ""
        code = f"signal {self.signal}" if self.signal else code
        why = WHY_ENDED.get(self.state, "")
        if not why:
            reason = self.reason not in ("NonZeroExitCode", "RaisedSignalInfo", *NOTHING)
            why = explain_reason(self.reason).words if reason else "its script ended with an error; see its log"
        return f"{self.state}: {why} ({code})" if code else f"{self.state}: {why}"


def unknown(job_id: str, why: str, answered: bool = True) -> SlurmJob:
    """Return a Job of which nothing is known."""
    return SlurmJob(job_id, "unknown", "none", reason=why, answered=answered)


def seconds(text: str) -> int | None:
    """Read `9:57`, `10:00:00` and `1-00:00:00`; None for UNLIMITED, INVALID and the like."""
    shape = CLOCK.fullmatch(text.strip())
    if shape is None:
        return None
    days, hours, minutes, rest = (int(digits or 0) for digits in shape.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest


def exit_status(text: str) -> tuple[int, int]:
    """Read `7:0` (code and signal), or the number that wait() gives: 1792."""
    code, colon, signal = text.strip().partition(":")
    if colon:
        return (int(code) if code.isdecimal() else 0), (int(signal) if signal.isdecimal() else 0)
    status = int(code) if code.isdecimal() else 0
    return status >> 8 & 0xFF, status & 0x7F


def _some(text: str) -> str:
    text = text.strip()
    return "" if text in NOTHING else text


def from_squeue(text: str) -> list[tuple[str, SlurmJob]]:
    """Read squeue's lines of COLUMNS; each with the id of the array that it belongs to, or its own."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) != COLUMNS.count("|") + 1 or not cells[0].isdecimal():
            continue
        whole, job_id, state, code, restarts, left, limit, start, nodes, reason = cells[:10]
        exit_code, signal = exit_status(code)
        job = SlurmJob(
            job_id, normal_state(state), "squeue", _some(reason), _some(nodes), seconds(left), seconds(limit),
            _some(start) or None, int(restarts) if restarts.isdecimal() else 0, exit_code, signal,
        )  # fmt: skip
        found.append((whole, job if job.state == "pending" else replace(job, start=None)))
    return found


def from_scontrol(text: str) -> list[tuple[str, SlurmJob]]:
    """Read `scontrol -o show job`: one line a Job or task of an array."""
    found = []
    for line in text.splitlines():
        fields = fields_of(line)
        if not fields.get("JobId", "").isdecimal():
            continue
        whole, task = fields.get("ArrayJobId", fields["JobId"]), fields.get("ArrayTaskId")
        exit_code, signal = exit_status(fields.get("ExitCode", ""))
        state, restarts = normal_state(fields.get("JobState", "")), fields.get("Restarts", "")
        job = SlurmJob(
            f"{whole}_{task}" if task else fields["JobId"], state, "scontrol", _some(fields.get("Reason", "")),
            _some(fields.get("NodeList", "")), None, seconds(fields.get("TimeLimit", "")),
            _some(fields.get("StartTime", "")) or None if state == "pending" else None,
            int(restarts) if restarts.isdecimal() else 0, exit_code, signal,
        )  # fmt: skip
        found.append((whole, job))
    return found


def fields_of(line: str) -> dict[str, str]:
    """Split `Key=value Key=value`; of a key that a path or a comment repeats further on, the first counts."""
    fields: dict[str, str] = {}
    keys = list(FIELD.finditer(line))
    for number, key in enumerate(keys):
        end = keys[number + 1].start() if number + 1 < len(keys) else len(line)
        fields.setdefault(key[1], line[key.end() : end].strip())
    return fields


def from_sacct(text: str) -> list[tuple[str, SlurmJob]]:
    """Read sacct's lines of SACCT_COLUMNS (-n -X -P)."""
    found = []
    for line in text.splitlines():
        cells = line.split("|")
        if len(cells) != SACCT_COLUMNS.count(",") + 1 or not re.match(r"[0-9]+(_|$)", cells[0]):
            continue
        exit_code, signal = exit_status(cells[2])
        job = SlurmJob(
            cells[0], normal_state(cells[1]), "sacct", nodes=_some(cells[4]), time_limit=seconds(cells[3]),
            exit_code=exit_code, signal=signal,
        )  # fmt: skip
        found.append((cells[0].partition("_")[0], job))
    return found


ORDER = ("running", "completing", "requeued", "suspended", "requeue_hold", "pending")


def by_id(rows: Iterable[tuple[str, SlurmJob]], ids: Iterable[str]) -> dict[str, SlurmJob]:
    """Return the Job of each id that is in `rows`; an array is as far as the least of its tasks."""
    rows = list(rows)
    found = {}
    for job_id in ids:
        tasks = [job for whole, job in rows if whole == job_id or names(job.job_id, job_id)]
        if tasks:
            states = count_states((job.job_id, job.state) for job in tasks) if "_" not in job_id else {}
            found[job_id] = replace(_least(tasks), job_id=job_id, tasks=states)
    return found


def _least(tasks: list[SlurmJob]) -> SlurmJob:
    """Choose the task that says how far the array is: one that runs, else one that waits, else one that failed."""
    for state in ORDER:
        if here := [task for task in tasks if task.state == state]:
            return next((task for task in here if task.stuck), here[0])
    return next((task for task in tasks if not task.success), tasks[0])
