"""Do pieces of work in processes of their own, some at a time, and take the results in order."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

AHEAD = 4  # times the processes: results that may wait for an earlier one
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGHUP, signal.SIGQUIT)
PR_SET_PDEATHSIG = 1


class LostProcessError(Exception):
    """A process ended and left no result."""


def in_processes(work: Callable[[Item], Result], items: Sequence[Item], processes: int) -> Iterator[Result]:
    """Give `work(item)` for each item, in their order, made by at most `processes` at a time; by one: in this one.

    Each item has a process to itself, forked here, so memory is given back after it and nothing is shared. An exception
    comes back as it is; LostProcessError where a process was killed. Whatever ends the iteration ends all processes.
    """
    if processes <= 1 or len(items) <= 1:
        yield from map(work, items)
        return
    context = get_context("fork")  # nothing has to be imported again, and the tokenizer is there already
    running: dict[Connection, tuple[int, ForkProcess]] = {}
    results: dict[int, Result] = {}
    started = given = 0
    try:
        while given < len(items):
            while len(running) < processes and started < min(len(items), given + AHEAD * processes):
                here, there = context.Pipe(duplex=False)
                process = context.Process(target=_child, args=(work, items[started], there, os.getpid()))
                process.start()
                there.close()  # or its end would not be seen here
                running[here] = started, process
                started += 1
            for connection in wait(list(running)):
                assert isinstance(connection, Connection)
                number, process = running.pop(connection)
                results[number] = _result(connection, process)
            while given in results:
                yield results.pop(given)
                given += 1
    finally:
        for _, process in running.values():
            process.kill()
            process.join()


def _result(connection: Connection, process: ForkProcess) -> Any:
    """Return what a process sent, or raise it."""
    try:
        error, value = connection.recv()
    except EOFError:
        process.join()
        code = process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        hint = "; often the machine ran out of memory" if code == -signal.SIGKILL else ""
        raise LostProcessError(f"process {process.pid} {how} and left no result{hint}") from None
    finally:
        connection.close()
    process.join()
    if error is not None:
        raise error
    return value


def _child(work: Callable[[Any], Any], item: Any, connection: Connection, parent: int) -> None:
    for number in STOP_SIGNALS:  # the parent takes them, and ends us
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    error, value = None, None
    try:
        value = work(item)
    except BaseException as raised:
        error = raised
    try:
        connection.send((error, value))
    except Exception:  # of an exception that cannot be sent
        connection.send((RuntimeError(f"{type(error).__name__}: {error}"), None))
    connection.close()
    os._exit(0)  # what the parent has registered for its own end is none of ours
