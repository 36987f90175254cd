"""End a process whose interpreter is held for too long: a small process beside it, which counts only time awake.

Nothing of Python runs in a process in which C code keeps the interpreter, so its watchdog thread cannot end it. A timer
of the kernel's or a C thread would, but each goes on while all is stopped, as a suspended Job is, and would end it when
it wakes. This process is stopped with it, and counts its own ticks.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from contextlib import suppress

TICK = 1.0  # seconds between looks; however long one took, it counts as this
KEPT = ("LD_LIBRARY_PATH",)  # of the environment: an interpreter may need it to start
LAST_WORDS_SECONDS = 5.0  # for the stacks, before SIGKILL


class Fuse:
    """The process beside this one. It ends with it, or when the fuse is closed."""

    def __init__(self) -> None:
        reader, self.pipe = os.pipe()
        os.set_blocking(self.pipe, False)
        # All signals blocked: those that end or stop the ranks reach all processes of a Job.
        self.process = os.posix_spawn(
            sys.executable, [sys.executable, "-S", "-I", __file__, str(os.getpid())],
            {name: os.environ[name] for name in KEPT if name in os.environ},
            file_actions=[(os.POSIX_SPAWN_DUP2, reader, 0)], setsigmask=signal.valid_signals(),
        )  # fmt: skip
        os.close(reader)

    def feed(self, seconds: float) -> None:
        """Give this process so many seconds more, from now on."""
        with suppress(OSError):  # full, or gone
            os.write(self.pipe, f"{seconds:.1f}\n".encode())

    def close(self) -> None:
        os.close(self.pipe)
        with suppress(ChildProcessError, ProcessLookupError):
            os.kill(self.process, signal.SIGKILL)
            os.waitpid(self.process, 0)


def is_stopped(pid: int) -> bool:
    """Tell whether a process is stopped by a signal or a debugger."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


def watch(pid: int) -> None:
    """Read how many seconds the process has left, and end it when they are over; return when it has ended."""
    given = left = float("inf")
    while left > 0:
        if os.getppid() != pid:  # a fork of it may keep the pipe open
            return
        if select.select([0], [], [], TICK)[0]:
            if not (words := os.read(0, 65_536).split()):
                return
            given = left = float(words[-1])
        elif not is_stopped(pid):
            left -= TICK
    print(
        f"HangError: no thread of Python has run in process {pid} for {given:.0f} s: code in C keeps the interpreter",
        file=sys.stderr, flush=True,
    )  # fmt: skip
    for number in (signal.SIGABRT, signal.SIGKILL):  # the first has its stacks printed (faulthandler)
        with suppress(ProcessLookupError):
            os.kill(pid, number)
        if select.select([0], [], [], LAST_WORDS_SECONDS)[0] and not os.read(0, 65_536):
            return


if __name__ == "__main__":
    watch(int(sys.argv[1]))
