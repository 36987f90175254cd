"""A thread that ends this rank when training cannot go on: a hang, a lost partner, a stop that nobody can agree on."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.lm.awake import AwakeClock
from pipeline.lm.door import Address, answers
from pipeline.lm.fuse import Fuse

POLL_SECONDS = 0.5
# How long the main thread may take to end by itself once it is clear that the attempt is over.
GRACE_SECONDS = 10.0
# Other ranks' watchdogs fire within moments; they get this long to print their stacks before stopped ones are killed.
REPORT_SECONDS = 5.0
# The watchdog itself needs the interpreter; code that never gives it up is ended this much later, by another process.
INTERPRETER_SECONDS = 10.0
DYING_SECONDS = 3.0  # that a killed process may take from closing its connections to being gone
NAMED = 8  # ranks named at most
KNOCKS = 32  # ranks of other hosts asked at a time


@dataclass(frozen=True)
class Rank:
    """A process of this attempt, and when it started: pids are used again."""

    rank: int
    host: str
    pid: int
    started: str | None
    door: Address | None = None  # where it answers as long as it lives

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (process {self.pid})"


@dataclass(frozen=True)
class Around:
    """What the watchdog asks and tells the world outside."""

    is_alive: Callable[[Rank], bool]  # taken to live where nobody can look
    stop_reason: Callable[[], str | None]
    said: Callable[[], tuple[str, str] | None]  # verdict and reason, once a rank of this attempt has left them
    event: Callable[..., None]  # event(kind, **details), from any rank
    hangs: Callable[[], list[dict[str, Any]]]  # the events "hang" of this attempt, of all ranks
    end: Callable[[str, str, int | None], None]  # end(verdict, reason, step) leaves a verdict and the process


@dataclass
class Watchdog:
    """Watch one rank. `beat` after each step; `expect` before something that may take another time than a step."""

    me: Rank
    around: Around
    first_step_timeout: float  # seconds from the start to the end of the first step
    hang_timeout: float  # seconds for each step after it
    fellows: list[Rank] = field(default_factory=list)
    step: int | None = None
    what: str = "start-up"
    waits: Callable[[], bool] = lambda: False  # whether this rank has done its share and waits for the others
    clock: AwakeClock = field(
        default_factory=AwakeClock
    )  # of all limits: time in which this process was stopped is none

    def __post_init__(self) -> None:
        self._fuse: Fuse | None = None
        self._stepped = False
        self._over: float | None = None  # since when it is known that the attempt cannot go on
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        faulthandler.enable()  # prints the stacks where the fuse, or a fault, ends this process
        with suppress(OSError):  # no more processes: then it does without
            self._fuse = Fuse()
        self.expect("start-up", self.first_step_timeout)
        self._thread.start()

    def close(self) -> None:
        """Stop watching; the attempt has come to its end."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
        self.clock.stop()
        if self._fuse is not None:
            self._fuse.close()
            self._fuse = None

    def expect(self, what: str, seconds: float) -> None:
        """Allow `seconds` for `what`, from now on."""
        self.what, self.limit, self.deadline = what, seconds, self.clock() + seconds
        self._feed(seconds)

    def _feed(self, seconds: float) -> None:
        if (fuse := self._fuse) is not None:
            fuse.feed(seconds + INTERPRETER_SECONDS)

    def beat(self, step: int) -> None:
        """Note that `step` is done."""
        self.step, self._stepped = step, True
        self.expect("a step", self.hang_timeout)

    def lost(self) -> Rank | None:
        """Return a rank of this machine whose process is gone."""
        return next((rank for rank in self.fellows if rank != self.me and not self.around.is_alive(rank)), None)

    def await_lost(self) -> Rank | None:
        """Return the rank whose end has broken a connection; its process is there for a moment after its sockets."""
        deadline = time.monotonic() + DYING_SECONDS
        while self.around.said() is None and time.monotonic() < deadline:
            if (lost := self.lost() or self._lost_elsewhere()) is not None:
                return lost
            time.sleep(0.05)
        return None

    def _lost_elsewhere(self) -> Rank | None:
        """Return a rank of another host that no longer answers. One connection to each: to be asked but seldom."""
        others = [rank for rank in self.fellows if rank.host != self.me.host]
        with ThreadPoolExecutor(max_workers=KNOCKS) as pool:
            there = list(pool.map(lambda rank: answers(rank.door), others))
        return next((rank for rank, lives in zip(others, there, strict=True) if not lives), None)

    @property
    def after(self) -> str:
        return "no step yet" if self.step is None else f"after step {self.step}"

    def _watch(self) -> None:
        self.clock.tick()
        while not self._closed.wait(POLL_SECONDS):
            if (stopped := self.clock.tick()) > 0:
                print(f"{self.me} was stopped for {stopped:.0f} s, which do not count", file=sys.stderr, flush=True)
                with suppress(OSError):
                    self.around.event("was stopped", rank=self.me.rank, step=self.step, seconds=round(stopped, 1))
            self._feed(max(0.0, self.deadline - self.clock()))
            if self.clock() > self.deadline:
                self._hang()
            elif (outlook := self._outlook()) is None:
                self._over = None
            elif self._overdue():
                self.around.end(*outlook, self.step)

    def _outlook(self) -> tuple[str, str] | None:
        """Return (verdict, reason) if the attempt cannot go on, None if it can."""
        if (said := self.around.said()) is not None:
            return said[0], f"rank {self.me.rank} ends: {said[1]}"
        if (lost := self.lost()) is not None:
            return "crash", f"{lost} is gone: it was killed, or ended by itself; {self.after}"
        if not self._stepped and (reason := self.around.stop_reason()) is not None:
            # Nothing is in memory yet that the newest checkpoint has not; compiling may go on for long.
            return "stopped", f"{reason}, before the first step was done"
        return None

    def _overdue(self) -> bool:
        """Tell whether the main thread has had its time to end by itself."""
        self._over = self.clock() if self._over is None else self._over
        return self.clock() > self._over + GRACE_SECONDS

    def _hang(self) -> None:
        """Say where this rank stands, hear the others, kill those of this machine that cannot speak, and end."""
        waits = self.waits()  # before anything else takes time
        self._feed(REPORT_SECONDS)
        reason = f"{self.after}: {self.what} took longer than {self.limit:g} s"
        print(f"\nhang: {self.me}, {reason}. All its Python stacks:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        sys.stderr.flush()
        self.around.event("hang", rank=self.me.rank, step=self.step, what=self.what, limit=self.limit, waits=waits)
        time.sleep(REPORT_SECONDS)
        culprits, why = blame(self.fellows, self.around.hangs())
        named = ", ".join(map(str, culprits[:NAMED])) + (" and more" if len(culprits) > NAMED else "")
        for rank in self.fellows:
            if rank != self.me and rank.host == self.me.host and is_stopped(rank.pid):
                print(f"{rank} is stopped or in the kernel; killed", file=sys.stderr, flush=True)
                self.around.event("rank killed", rank=rank.rank, step=self.step, reason="stopped or in the kernel")
                os.kill(rank.pid, signal.SIGKILL)
        self.around.end("hang", f"hang: {named or self.me}, {reason}{why}", self.step)


def blame(fellows: list[Rank], hangs: list[dict[str, Any]]) -> tuple[list[Rank], str]:
    """Return the ranks that hold the others up and how that is known: those that are silent, else those that work on.

    Nobody, where all say the same: then it is the network, or something that all of them do.
    """
    said = {report.get("rank"): report for report in hangs}
    silent = [rank for rank in fellows if rank.rank not in said]
    if silent:
        return silent, "; silent since: stopped, in the kernel, or in code that keeps the interpreter"
    busy = [rank for rank in fellows if not said[rank.rank].get("waits")]
    if len(busy) < len(fellows):
        return busy, "; still in its own share of the step, while the others wait" if busy else ""
    return [], ""


def is_stopped(pid: int) -> bool:
    """Tell whether a process is stopped (T, t) or waits in the kernel (D): it cannot speak for itself."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] in "TtD"
