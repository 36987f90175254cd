"""Take signals from the first moment of a stage's process on; each main imports this before anything heavy.

torch takes seconds to import, and a signal in that time would end the process with no verdict, or be lost: an
exception raised from a handler while Python imports may be swallowed by a callback of the import system. So signals are
only noted here, and looked at when the imports are done.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from pipeline.signals import STOP_SIGNALS, die_with_parent

AGAIN_SECONDS = 1.0
STARTED = time.time()
PARENT = os.getppid()


class Stopped(BaseException):
    """The attempt was asked to end. Not an Exception, so that no handler on the way swallows it."""

    def __init__(self, reason: str, step: int | None = None) -> None:
        super().__init__(reason)
        self.step = step


class Signals:
    """The first stop signal that reached this process, if any."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.rank_lost = False  # it is torchrun's, which ends the other ranks when one has failed
        self._raises = False

    def install(self) -> None:
        """Note stop signals from now on instead of dying of them."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.name is None:
            self.rank_lost = number == signal.SIGTERM and _siblings_are_missing()
            self.name = signal.Signals(number).name
        self.check()

    def check(self) -> None:
        """Raise Stopped inside `raising` if a signal came."""
        if self.name is not None and self._raises:
            # Raised inside a destructor or a weak reference's callback it would be swallowed: so again in a second.
            signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS)
            raise Stopped(f"stopped by {self.name}")

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Raise Stopped in the body, in the middle of whatever it does: for stages that have nothing to save."""
        former = signal.signal(signal.SIGALRM, lambda number, frame: self.check())
        self._raises = True
        try:
            self.check()
            yield
        finally:
            self._raises = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, former)

    def ignore(self) -> None:
        """Let no further signal tear what is written last."""
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def _siblings_are_missing() -> bool:
    """Tell whether the parent, a torchrun, has fewer living children than it started; False where that is not known."""
    expected, parent = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), Path(f"/proc/{PARENT}")
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.getppid() != PARENT:  # or the launcher itself was killed
        return False
    try:
        lists = [path.read_text().split() for path in parent.glob("task/*/children")]
        children = [Path(f"/proc/{pid}/stat").read_text() for pids in lists for pid in pids]
    except OSError:
        return os.getppid() == PARENT  # one went away while we looked; the parent may be it
    alive = [stat for stat in children if stat.rpartition(")")[2].split()[0] not in "ZX"]
    return bool(lists) and len(alive) < expected


def leave_no_core() -> None:
    """Write no core file: it would hold the secrets of the environment, and lie in the Run, as large as the rank."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


SIGNALS = Signals()

# Only in a process that is a stage: a test that imports one keeps its own handlers.
_main = getattr(sys.modules.get("__main__"), "__spec__", None)
if _main is not None and str(_main.name).startswith("pipeline.stages."):
    SIGNALS.install()
    die_with_parent()
    leave_no_core()
