"""Run one command, bounded in time, and hear all that it says."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import BinaryIO

from pipeline.slurm.environment import clean_environment
from pipeline.slurm.errors import Answer


def hear(
    words: Sequence[str],
    timeout: float,
    given_text: str = "",
    own_session: bool = False,
    environment: Mapping[str, str] | None = None,
) -> Answer:
    """Run `words`, end them after `timeout` seconds with what they have started, and return what they said.

    `environment` is theirs; without it, this process's own, cleaned.

    OSError or ValueError (a NUL in a word) where they cannot be run.
    """
    environment = clean_environment() if environment is None else environment
    with _memory() as given, _memory() as output, _memory() as talk:
        given.write(given_text.encode())
        given.seek(0)
        process = subprocess.Popen(
            words, stdin=given, stdout=output, stderr=talk, env=environment,
            # A group of its own, to end what it starts too. A session, by which the way in cannot wait for a
            # password at our terminal, costs a busy Linux as much again as a third of sbatch.
            start_new_session=own_session, process_group=None if own_session else 0,
        )  # fmt: skip
        code: int | None = None
        with process:
            try:
                _await_end(process.pid, timeout)
                code = process.wait(0)
            except subprocess.TimeoutExpired:
                talk.write(f"\nno answer within {timeout:g} seconds".encode())
            finally:
                if code is None:  # also on Ctrl-C: it, and what it has started
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
        texts = []
        for file in (output, talk):
            file.seek(0)
            texts.append(file.read().decode("utf-8", "replace"))
    return Answer(code, *texts)


def _memory() -> BinaryIO:
    """Open a file that lies in memory.

    No pipe: what ssh leaves behind to share its connection would keep one open for ever. None on a disk: making three
    of them takes as long as sbatch.
    """
    return open(os.memfd_create("slurm"), "w+b")


def _await_end(pid: int, timeout: float) -> None:
    """Sleep until a child ends or its time is up; Popen.wait looks only every 50 ms, six times what sbatch takes."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:  # a kernel before 5.3, or a sandbox
        deadline = time.monotonic() + timeout
        while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return
    try:
        select.select([handle], [], [], timeout)
    finally:
        os.close(handle)
