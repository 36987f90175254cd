"""Do pieces of work in processes of their own, some at a time, and take the results in order."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, TypeVar

from pipeline.signals import STOP_SIGNALS, die_with_parent

Item = TypeVar("Item")
Result = TypeVar("Result")

AHEAD = 4  # times the processes: results that may wait for an earlier one


class LostProcessError(Exception):
    """A process ended and left no result."""


def in_processes(
    work: Callable[[Item], Result], items: Sequence[Item], processes: int
) -> Generator[Result, None, None]:
    """Give `work(item)` for each item, in their order, made by at most `processes` at a time; by one: in this one.

    The processes are forked here and take item after item, so what `work` remembers is remembered. An exception comes
    back as it is; LostProcessError where a process was killed. Whatever ends the iteration ends all processes.
    """
    if processes <= 1 or len(items) <= 1:
        yield from map(work, items)
        return
    workers = []
    results: dict[int, Result] = {}
    started = given = 0
    try:
        workers = [_Worker(work, items) for _ in range(min(processes, len(items)))]
        while given < len(items):
            for worker in workers:
                if worker.item is None and started < min(len(items), given + AHEAD * processes):
                    worker.begin(started)
                    started += 1
            busy = {worker.connection: worker for worker in workers if worker.item is not None}
            for connection in wait(list(busy)):
                assert isinstance(connection, Connection)
                number, result = busy[connection].result()
                results[number] = result
            while given in results:
                yield results.pop(given)
                given += 1
    finally:
        for worker in workers:
            worker.end()


class _Worker:
    """A forked process that does one item at a time."""

    def __init__(self, work: Callable[[Any], Any], items: Sequence[Any]) -> None:
        context = get_context("fork")  # nothing has to be imported again, and the tokenizer is there already
        self.connection, there = context.Pipe()
        self.process: ForkProcess = context.Process(target=_serve, args=(work, items, there, os.getpid()))
        self.process.start()
        there.close()  # or its end would not be seen here
        self.item: int | None = None

    def begin(self, item: int) -> None:
        self.item = item
        self.connection.send(item)

    def result(self) -> tuple[int, Any]:
        """Return the number of the item and what came of it, or raise what it raised."""
        item, self.item = self.item, None
        assert item is not None
        try:
            error, value = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            code = self.process.exitcode or 0
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
            hint = "; often the machine ran out of memory" if code == -signal.SIGKILL else ""
            raise LostProcessError(f"process {self.process.pid} {how} and left no result{hint}") from None
        if error is not None:
            raise error
        return item, value

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def _serve(work: Callable[[Any], Any], items: Sequence[Any], connection: Connection, parent: int) -> None:
    for number in STOP_SIGNALS:  # the parent takes them, and ends us
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(signal.SIGKILL)
    while os.getppid() == parent:
        item = connection.recv()
        error, value = None, None
        try:
            value = work(items[item])
        except BaseException as raised:
            error = raised
        try:
            connection.send((error, value))
        except Exception:  # of an exception that cannot be sent
            connection.send((RuntimeError(f"{type(error).__name__}: {error}"), None))
    os._exit(1)
