"""What the time of one attempt goes into: each moment belongs to one kind, so that the kinds add up to the whole."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

KINDS = ("startup", "load", "data", "step", "save", "repeated")
WRITE_SECONDS = 10.0  # a killed attempt loses the account of at most this much
MARKS = 64  # saves remembered, more than checkpoints are kept


Mark = tuple[int, float, float]  # (step, seconds in steps, in data) where a checkpoint was taken


class Ledger:
    """The account of one attempt. `began` is when its job script started (unix s)."""

    def __init__(self, began: float, write: Callable[[dict[str, Any]], None]) -> None:
        self.began, self._write = began, write
        self.seconds = dict.fromkeys(KINDS, 0.0)
        self.seconds["startup"] = max(0.0, time.time() - began)
        self.kind = "startup"
        self.first: int | None = None  # the step that this attempt went on from
        self.marks: list[Mark] = []  # of the checkpoints that are on disk
        self._last = time.monotonic()
        self._written = self._last
        self._due = False

    def enter(self, kind: str) -> None:
        """Book the time until now on the kind that was current; from now on it is `kind`."""
        now = time.monotonic()
        self.seconds[self.kind] += now - self._last
        self._last, self.kind = now, kind

    @contextmanager
    def during(self, kind: str) -> Iterator[None]:
        """Book the body on `kind`, and what follows on what was current before."""
        former = self.kind
        self.enter(kind)
        try:
            yield
        finally:
            self.enter(former)

    def here(self, step: int) -> Mark:
        """Return the mark of `step`, to be set when a checkpoint of it is on disk: a save may be killed half way."""
        self.enter(self.kind)
        self.first = step if self.first is None else self.first
        return step, self.seconds["step"], self.seconds["data"]

    def mark(self, mark: Mark) -> None:
        """Note that this state is on disk: what was done up to it is not lost any more. Any thread may call it."""
        self.marks = [*self.marks[1 - MARKS :], mark]
        self._due = True  # the account on disk must not lag behind the checkpoints there

    def roll_back(self, step: int) -> None:
        """Book what was done since `step` as repeated."""
        self.enter(self.kind)
        done, data = next(((s, d) for at, s, d in reversed(self.marks) if at <= step), (0.0, 0.0))
        self.seconds["repeated"] += self.seconds["step"] - done + self.seconds["data"] - data
        self.seconds["step"], self.seconds["data"] = done, data

    def write(self, *, now: bool = False) -> None:
        """Write the account if it is due, or `now`."""
        if now or self._due or time.monotonic() - self._written > WRITE_SECONDS:
            self._due = False
            self.enter(self.kind)
            self._written = self._last
            self._write(self.to_json())

    def to_json(self) -> dict[str, Any]:
        seconds = {kind: round(value, 4) for kind, value in self.seconds.items()}
        until = round(self.began + sum(seconds.values()), 4)
        return {"began": self.began, "until": until, "first": self.first, "seconds": seconds, "marks": self.marks}
