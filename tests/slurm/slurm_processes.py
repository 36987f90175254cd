"""Processes that a folder remembers, so that a later call, also by another program, ends exactly those."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

NICE = ("nice", "-n", "10")


class SlurmError(Exception):
    """The private Slurm cannot do what was asked; the text says why."""


def wait_until(what: str, ready: Callable[[], object], timeout: float, pause: float = 0.1) -> None:
    """Call `ready` until it returns something true, for at most `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not ready():
        if time.monotonic() > deadline:
            raise SlurmError(f"waited {timeout:.0f} s in vain for {what}")
        time.sleep(pause)


def start_of(pid: int) -> str:
    """Return the moment that the kernel wrote down for this process; "" if it has ended (a zombie has)."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if words[0] == "Z" else words[19]


def host_of(pid: int | str) -> str:
    """Return the name of the process's UTS namespace; "" if it has ended."""
    try:
        return os.readlink(f"/proc/{pid}/ns/uts")
    except OSError:
        return ""


@dataclass
class Process:
    """One process. A pid alone is no name: the kernel gives it to the next one."""

    pid: int
    started: str
    is_host: bool = False

    def alive(self) -> bool:
        return bool(self.started) and start_of(self.pid) == self.started

    def kill(self, number: signal.Signals) -> None:
        if self.alive():
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Processes:
    """The processes of one folder, by name, and its hosts.

    A host is a process that sleeps in a UTS and a mount namespace of its own. What is started on it sees another host
    name and another /etc/hosts; everything that descends from it, however it was started and whatever became of its
    parent, can be found by the namespace.
    """

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self.folder, self.env = folder, env
        self.file = folder / "processes.json"
        known = json.loads(self.file.read_text()) if self.file.exists() else {}
        self.known = {name: Process(**process) for name, process in known.items()}
        self.children: list[subprocess.Popen[bytes]] = []

    def start(
        self, name: str, *words: str, host: str = "", is_host: bool = False, env: Mapping[str, str] | None = None
    ) -> None:
        """Start a daemon in the foreground, on a host if one is named, its output in log/NAME.out."""
        if host:
            # setns at once and not through a shell: the pid that we keep is the daemon's.
            words = ("nsenter", f"--target={self.known[host].pid}", "--uts", "--mount", "--root", *words)
        with (self.folder / "log" / f"{name}.out").open("ab") as output:
            child = subprocess.Popen(
                [*NICE, *words], stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=self.folder,
                env={**self.env, **(env or {})}, start_new_session=True,
            )  # fmt: skip
        self.children.append(child)
        self.known[name] = Process(child.pid, start_of(child.pid), is_host)
        known = {known: asdict(process) for known, process in self.known.items()}
        self.file.write_text(json.dumps(known, indent=1))

    def start_host(self, name: str, mounts: Mapping[Path, Path] | None = None) -> None:
        """Start a host. Its mounts are its own: nothing that is mounted there is seen, or left, outside."""
        script = (
            'hostname "$1"; shift; while [ $# != 0 ]; do mount --bind "$1" "$2"; shift 2; done; exec sleep infinity'
        )
        pairs = {self.folder / "hosts": Path("/etc/hosts")} | dict(mounts or {})
        words = [str(path) for pair in pairs.items() for path in pair]
        self.start(name, "unshare", "--mount", "--uts", "sh", "-e", "-c", script, "sh", name, *words, is_host=True)
        command = Path(f"/proc/{self.known[name].pid}/comm")
        self.wait_for(name, lambda: command.read_text() == "sleep\n", 10)

    def alive(self, name: str) -> bool:
        for child in self.children:
            child.poll()
        return name in self.known and self.known[name].alive()

    def last_words(self, name: str) -> str:
        output = (self.folder / "log" / f"{name}.out").read_text(errors="replace")
        return "\n".join(output.splitlines()[-15:])

    def check(self, name: str) -> bool:
        """Return True, or say what a process that has ended said last."""
        if not self.alive(name):
            raise SlurmError(f"{name} has ended:\n{self.last_words(name)}")
        return True

    def wait_for(self, name: str, ready: Callable[[], object], timeout: float = 20) -> None:
        """Wait until a daemon is ready for use; one that is not says what it said last."""
        try:
            wait_until(name, lambda: self.check(name) and ready(), timeout, 0.05)
        except SlurmError as error:
            raise SlurmError(f"{error}\n{self.last_words(name)}" if self.alive(name) else str(error)) from None

    def hosts(self) -> list[str]:
        return [name for name, process in self.known.items() if process.is_host]

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL, timeout: float = 10) -> None:
        """End one process and wait for its end; one that hears no other signal is killed."""
        if name not in self.known:
            return
        self.known[name].kill(number)
        with suppress(SlurmError):
            wait_until(f"the end of {name}", lambda: not self.alive(name), timeout, 0.02)
            return
        self.known[name].kill(signal.SIGKILL)
        wait_until(f"the end of {name}", lambda: not self.alive(name), 10, 0.02)

    def pids_on(self, host: str) -> list[int]:
        """List what runs on a host: slurmd, the steps' daemons and the jobs' processes, but not the host itself."""
        holder = self.known[host]
        name = host_of(holder.pid) if self.alive(host) else ""
        if name in ("", host_of("self")):
            return []
        pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
        return [pid for pid in pids if pid != holder.pid and host_of(pid) == name and start_of(pid)]

    def kill_host(self, host: str) -> None:
        """End everything on a host, then the host."""

        def empty() -> bool:
            left = self.pids_on(host)
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not left

        wait_until(f"the end of all on {host}", empty, 20, 0.05)
        self.kill(host)
