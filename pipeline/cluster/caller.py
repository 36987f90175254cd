"""Who called this process from elsewhere: what the Run is called there, and whether the caller is still there."""

from __future__ import annotations

import json
import os
import signal
import threading
from contextlib import suppress
from typing import NamedTuple

VARIABLE = "PIPELINE_CALLER"


class Caller(NamedTuple):
    """How a command line begins on the caller's machine, and the Run's folder on both."""

    python: str
    here: str  # the caller's
    there: str  # ours

    def variable(self) -> str:
        """Return the assignment by which a process on the other machine gets to know this."""
        return f"{VARIABLE}={json.dumps(self)}"


def caller() -> Caller | None:
    """Return who called from elsewhere; None for a person at this machine."""
    with suppress(KeyError, ValueError, TypeError):
        return Caller(*map(str, json.loads(os.environ[VARIABLE])))
    return None


def end_with_caller() -> None:
    """Interrupt this process when its caller's end of standard input is closed.

    Without a terminal nothing else tells it: a `logs -f` would go on for weeks after the connection was lost.
    """
    if caller() is None:
        return

    def watch() -> None:
        with suppress(OSError):
            while os.read(0, 1024):
                pass
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=watch, daemon=True).start()
