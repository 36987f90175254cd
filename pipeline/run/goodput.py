"""Where the time of a Run's training went, from the accounts of its attempts. Pure: records in, a split out."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from pipeline.run.attempts import account_of, all_attempts
from pipeline.run.folder import Run
from pipeline.run.records import Record, VerdictRecord, number, whole
from pipeline.run.verdict import LOST


@dataclass(frozen=True)
class Split:
    """Seconds of wall time by what they went into; together they are the wall time."""

    startup: float = 0.0  # from the job script's start to the first step, compiling included
    load: float = 0.0
    data: float = 0.0  # waiting for batches
    step: float = 0.0  # steps that count
    save: float = 0.0
    repeated: float = 0.0  # steps that were lost, with their data, and made again
    down: float = 0.0  # between attempts

    @property
    def wall(self) -> float:
        return float(sum(asdict(self).values()))

    @property
    def goodput(self) -> float | None:
        """Return the share of the wall time that went into steps that count."""
        return self.step / self.wall if self.wall > 0 else None

    def to_json(self) -> dict[str, float]:
        return {name: round(seconds, 3) for name, seconds in asdict(self).items()}


KINDS = tuple(field.name for field in fields(Split))


def read_split(run: Run, now: float | None = None) -> Split | None:
    """Return the split of a Run's training, up to `now` if it goes on; None where no attempt left an account."""
    accounts = []
    for one in all_attempts(run):
        account, verdict = account_of(run, one.job_id, one.number), one.verdict
        if account:
            accounts.append(account | {"ended": None if verdict is None or verdict.verdict == LOST else verdict.time})
        elif verdict is not None and (account := _never_trained(verdict)):
            accounts.append(account)
    return split(accounts, now)


def _never_trained(verdict: VerdictRecord) -> Record:
    """Return the account of an attempt that ended before training could begin one: all of it was start-up.

    A lost one is left out: nobody knows when it ended.
    """
    began, ended = verdict.began, verdict.time
    if verdict.stage != "pretrain" or verdict.verdict == LOST or began is None or not ended:
        return {}
    return {"began": began, "until": ended, "first": None, "marks": [], "seconds": {"startup": max(0.0, ended - began)}}


def split(accounts: list[Record], now: float | None = None) -> Split | None:
    """Add up the accounts of all attempts.

    An attempt's steps beyond the step that a later one went on from were lost: they are `repeated`. So is the time
    between the last account of a killed attempt and its end, as far as a verdict tells when that was. No moment counts
    twice: an attempt that waits for a former one to end begins, here, when that has ended.
    """
    known = [account for account in accounts if _seconds(account) and number(account.get("began")) is not None]
    known.sort(key=lambda account: account["began"])
    if not known:
        return None
    total = dict.fromkeys(KINDS, 0.0)
    end = float(known[0]["began"])
    for place, account in enumerate(known):
        began = float(account["began"])
        total["down"] += max(0.0, began - end)
        later = known[place + 1 :]
        for kind, seconds in _attempt(account, later).items():
            total[kind] += seconds
        total["startup"] -= min(max(0.0, end - began), _seconds(account)["startup"])
        end = max(end, _end(account, later[0] if later else None))
    if now is not None:  # since the last account, seconds ago
        total["startup" if whole(known[-1].get("first")) is None else "step"] += max(0.0, now - end)
    return Split(**total)


def _attempt(account: Record, later: list[Record]) -> dict[str, float]:
    """Return the seconds of one attempt, with its lost steps booked as repeated."""
    seconds = _seconds(account)
    went_on = [first for other in later if (first := whole(other.get("first"))) is not None]
    if went_on:
        lost_step, lost_data = _beyond(account, min(went_on), seconds)
        seconds["step"] -= lost_step
        seconds["data"] -= lost_data
        seconds["repeated"] += lost_step + lost_data
    seconds["repeated"] += max(0.0, _end(account, later[0] if later else None) - float(account["until"]))
    return seconds


def _beyond(account: Record, step: int, seconds: dict[str, float]) -> tuple[float, float]:
    """Return the seconds in steps and in data after the account's last checkpoint at or before `step`."""
    marks = [mark for mark in account.get("marks") or [] if isinstance(mark, list | tuple) and len(mark) == 3]
    kept = [mark for mark in marks if mark[0] <= step]
    done, data = (kept[-1][1], kept[-1][2]) if kept else (0.0, 0.0)
    return max(0.0, seconds["step"] - done), max(0.0, seconds["data"] - data)


def _end(account: Record, following: Record | None) -> float:
    """Return when an attempt ended: by its verdict, but not after the next began; else by its last account."""
    until = float(account["until"])
    end = max(until, number(account.get("ended")) or until)
    return max(until, min(end, float(following["began"]))) if following else end


def _seconds(account: Record) -> dict[str, float]:
    found: Any = account.get("seconds")
    if not isinstance(found, dict) or number(account.get("until")) is None:
        return {}
    return {kind: number(found.get(kind)) or 0.0 for kind in KINDS if kind != "down"}
