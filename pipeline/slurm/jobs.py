"""What Slurm says about a Job, read from squeue, scontrol or sacct into one shape."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from pipeline.slurm.arrays import count_states, names
from pipeline.slurm.node_lists import few_nodes
from pipeline.slurm.states import ENDED, explain_reason, lacks_nodes, normal_state
from pipeline.units import duration

# ASCII's own ends of a cell and of a block: people write `|` and line ends into names and comments, never these.
# Free text comes last all the same, so that nothing in it can shift the state of a Job.
CELL, ROW = "\x1f", "\x17"
FIELDS = (
    "ArrayJobID JobArrayID State exit_code RestartCnt TimeLeft TimeLimit StartTime NodeList Dependency UserName "
    "Reason Name Comment"
).split()
FREE_TEXT = 2  # of them, at the end
# A width of 0 neither pads nor cuts, in every Slurm since 20.11.
COLUMNS = ",".join(f"{name}:0{ROW if name == FIELDS[-1] else CELL}" for name in FIELDS)
SACCT_COLUMNS = "JobID,State,ExitCode,Timelimit,NodeList,User,JobName,Comment"
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
    """One Job as Slurm sees it. `source` is the command that said so; times are seconds, `start` is Slurm's text.

    `user` is the name of its owner, `comment` holds our token, `dependency` is Slurm's text of what it waits for.
    """

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
    comment: str = ""
    user: str = ""
    name: str = ""
    dependency: str = ""

    @property
    def ended(self) -> bool:
        """Tell whether Slurm says that it will not run again."""
        return self.state in ENDED

    @property
    def gone(self) -> bool:
        """Tell whether Slurm answered, and the Job ended or nobody knows it any more."""
        return self.ended or self.forgotten

    @property
    def forgotten(self) -> bool:
        """Tell whether Slurm answered and nobody knows it any more."""
        return self.source == "none" and self.answered

    @property
    def alive(self) -> bool:
        """Tell whether it may run or come to run: Slurm names it and does not say that it ended, or cannot be asked."""
        return not self.gone

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
                words = f"too few nodes are left without {few_nodes(self.excluded)}, which it is kept off ({words})"
            return f"{words}; Slurm expects to start it at {self.start}" if self.start else words
        if self.state in ("running", "completing", "suspended", "requeued"):
            left = f", {duration(self.time_left)} left" if self.time_left is not None else ""
            return f"{self.state} on {few_nodes(self.nodes)}{left}" if self.nodes else self.state
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
    """Read squeue's rows of COLUMNS below their titles; each with the id of the array that it belongs to, or its own.

    ValueError where it is anything else: the titles prove that squeue said all of it, also where it lists no Job.
    """
    *records, rest = text.split(ROW)  # `rest`: nothing, or what a way in says when it ends
    titles, *rows = [record.split(CELL) for record in records] or [[]]
    if len(titles) != len(FIELDS) or titles[-1].strip() != "COMMENT" or CELL in rest:
        raise ValueError("it is not a list of Jobs")
    return [_from_row(row) for row in rows]


def _from_row(row: list[str]) -> tuple[str, SlurmJob]:
    """Read one row; where a name or comment holds a separator, it is none of ours, and both are left out."""
    whole, *cells = (cell.strip() for cell in row[:-FREE_TEXT])
    if len(row) < len(FIELDS) or not whole.isdecimal():
        raise ValueError("a row of it is not a Job")
    job_id, state, code, restarts, left, limit, start, nodes, dependency, user, reason = cells[: len(FIELDS) - 3]
    name, comment = row[-FREE_TEXT:] if len(row) == len(FIELDS) else ("", "")
    exit_code, signal = exit_status(code)
    job = SlurmJob(
        job_id, normal_state(state), "squeue", _some(reason), _some(nodes), seconds(left), seconds(limit),
        _some(start) or None, int(restarts) if restarts.isdecimal() else 0, exit_code, signal,
        comment=_some(comment), user=_some(user), name=_some(name), dependency=_some(dependency),
    )  # fmt: skip
    return whole, job if job.state == "pending" else replace(job, start=None)


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
            comment=_some(fields.get("Comment", "")), user=fields.get("UserId", "").partition("(")[0],
            name=_some(fields.get("JobName", "")), dependency=_some(fields.get("Dependency", "")),
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
    """Read sacct's lines of SACCT_COLUMNS (-n -X -P --delimiter=CELL)."""
    found = []
    for line in text.split("\n"):
        cells = line.split(CELL)
        if len(cells) != SACCT_COLUMNS.count(",") + 1 or not re.match(r"[0-9]+(_|$)", cells[0]):
            continue
        job_id, state, code, limit, nodes, user, name, comment = cells
        exit_code, signal = exit_status(code)
        job = SlurmJob(
            job_id, normal_state(state), "sacct", nodes=_some(nodes), time_limit=seconds(limit), exit_code=exit_code,
            signal=signal, user=_some(user), name=_some(name), comment=_some(comment),
        )  # fmt: skip
        found.append((job_id.partition("_")[0], job))
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
