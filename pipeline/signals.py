"""Signals that ask a process to end, and the one that comes when its parent has ended."""

from __future__ import annotations

import ctypes
import os
import signal

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGHUP, signal.SIGQUIT)
PR_SET_PDEATHSIG = 1


def die_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Ask Linux for a signal when the parent ends, so that a killed launcher leaves no process behind."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), number)
