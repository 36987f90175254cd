"""Job arrays: the names of their tasks as Slurm writes them, and how far all of them are, in few words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

TASKS = re.compile(r"([0-9]+)_(?:([0-9]+)|\[([0-9,:%-]+)(?:\.\.\.)?\])")
RANGE = re.compile(r"([0-9]+)(?:-([0-9]+)(?::([0-9]+))?)?")


def task_numbers(job_id: str) -> list[int]:
    """Return the tasks that an id names: none of `12`, 4 of `12_4`, several of `12_[0-3,7%2]`."""
    match = TASKS.fullmatch(job_id)
    if match is None:
        return []
    if match[2]:
        return [int(match[2])]
    numbers: list[int] = []
    for part in match[3].partition("%")[0].split(","):
        if shape := RANGE.fullmatch(part):
            first, last = int(shape[1]), int(shape[2] or shape[1])
            numbers += range(first, last + 1, int(shape[3] or 1))
    return numbers


def names(job_id: str, wanted: str) -> bool:
    """Tell whether `job_id` is the task `wanted` or, as tasks that wait are written, has it among others."""
    array, _, task = wanted.partition("_")
    return job_id == wanted or (
        task.isdecimal() and job_id.startswith(f"{array}_[") and int(task) in task_numbers(job_id)
    )


def count_states(tasks: Iterable[tuple[str, str]]) -> dict[str, int]:
    """Count the tasks in each state, of pairs of id and state; empty where no array is meant."""
    counts: Counter[str] = Counter()
    for job_id, state in tasks:
        counts[state] += len(task_numbers(job_id))
    return {state: number for state, number in counts.items() if number}


def words(total: int, complete: int, states: Mapping[str, int]) -> str:
    """Say how far an array of `total` tasks is: `5 of 8 tasks complete, 2 running, 1 pending`."""
    active = [f"{states[state]} {state}" for state in ("running", "pending", "requeue_hold") if states.get(state)]
    return ", ".join([f"{complete} of {total} tasks complete", *active])
