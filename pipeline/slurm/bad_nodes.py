"""Nodes that failed an attempt, with reason and expiry, in a folder that all Runs and users of a cluster may share.

Each user writes a file of their own, and whose a file is, its owner says, not its text. One's own entries keep Jobs off
a node; those of others only advise, or anybody could keep good nodes from everybody.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pipeline.cluster.schema import Cluster
from pipeline.files import append_line
from pipeline.run.folder import Run
from pipeline.run.records import Record, number
from pipeline.visible import visible

WITHDRAWN = "withdrawn"
NODE = re.compile(r"[A-Za-z0-9][\w.-]{0,253}", re.ASCII)
MOST_HOURS = 10_000.0  # that an entry may count, which is the most that a cluster file can ask for
MOST_TEXT = 300  # characters of a reason
MOST_FILES = 1000
MOST_BYTES = 1 << 20  # of one file, from its end


@dataclass(frozen=True)
class BadNode:
    name: str
    reason: str
    until: float  # unix s
    run: str  # that it failed
    by: str = ""  # the other user who says so


class BadNodes:
    """A folder with a file of JSON lines for each user; each node counts until its time is over."""

    def __init__(self, folder: Path, mode: int = 0o755) -> None:
        """`mode` is that of the folder of files, if it is to be made."""
        self.folder, self.mode = folder / "bad_nodes", mode
        self.former = folder / "bad_nodes.jsonl"  # of version 0.1.0: one for all

    @property
    def is_there(self) -> bool:
        """Tell whether anybody has ever put a node on the list."""
        return self.folder.is_dir() or self.former.is_file()

    def add(self, names: list[str], reason: str, hours: float, run: str) -> None:
        """Keep off these nodes for `hours` from now. OSError where that cannot be written."""
        self._append(names, reason, time.time() + hours * 3600, run)

    def withdraw(self, names: list[str], run: str) -> None:
        """Take back what `run` has said of these nodes; what other Runs say of them stays."""
        self._append(names, WITHDRAWN, 0, run)

    def read(self, now: float | None = None) -> dict[str, BadNode]:
        """Return those that one's own entries name and that count now, by name."""
        return {node.name: node for node in self._entries(now) if not node.by}

    def advice(self, now: float | None = None) -> list[BadNode]:
        """Return what other users say of nodes: the last word of each on each node."""
        return list({(node.by, node.name): node for node in self._entries(now) if node.by}.values())

    def _append(self, names: list[str], reason: str, until: float, run: str) -> None:
        if not self.folder.is_dir():
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                self.folder.mkdir()
                self.folder.chmod(self.mode)  # whatever the umask
        path = self._own_file()
        for name in names:
            append_line(path, {"node": name, "reason": reason[:MOST_TEXT], "until": until, "run": run})

    def _own_file(self) -> Path:
        """Return a file that is surely ours: anybody may have made one of our name, or a link in its place."""
        me = _user(os.getuid())
        further = sorted(self.folder.glob(f"{me}-*.jsonl"))[:MOST_FILES]
        for path in (self.folder / f"{me}.jsonl", *further, self.folder / f"{me}-{secrets.token_hex(8)}.jsonl"):
            with suppress(OSError):
                fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
                status = os.fstat(fd)
                os.close(fd)
                if _is_plain(status) and status.st_uid == os.getuid():
                    return path
        raise PermissionError(f"{self.folder}: no file of one's own can be made there")

    def _entries(self, now: float | None) -> list[BadNode]:
        """Return what counts now, each file's in its order."""
        now = time.time() if now is None else now
        words: list[tuple[int, BadNode]] = []
        for owner, record in self._records():
            node = _node(record, owner, now)
            if node is None:
                continue
            if node.reason == WITHDRAWN:
                words = [
                    (uid, word) for uid, word in words if (uid, word.name, word.run) != (owner, node.name, node.run)
                ]
            elif node.until > now:
                words.append((owner, node))
        return [word for _, word in words]

    def _records(self) -> Iterator[tuple[int, Record]]:
        """Yield (uid of who owns it, entry) of all files; what cannot be read says nothing."""
        yield from _records_of(self.former, shared=True)
        try:
            names = sorted(name for name in os.listdir(self.folder) if name.endswith(".jsonl"))[:MOST_FILES]
        except OSError:
            return
        for name in names:
            yield from _records_of(self.folder / name)


def _records_of(path: Path, shared: bool = False) -> Iterator[tuple[int, Record]]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):  # a folder, or a pipe
        os.close(fd)
        return
    with os.fdopen(fd, "rb") as file:
        if not _is_plain(status) or (status.st_mode & 0o022 and not shared):
            return  # whoever may write it, nobody can say whose it is
        # The single file of before may be everybody's; then its words are nobody's own.
        owner = -1 if status.st_mode & 0o022 else status.st_uid
        with suppress(OSError):
            file.seek(max(0, status.st_size - MOST_BYTES))
            for line in file.read(MOST_BYTES).split(b"\n"):
                with suppress(ValueError, RecursionError):
                    record = json.loads(line)
                    if isinstance(record, dict):
                        yield owner, record


def _node(record: Record, owner: int, now: float) -> BadNode | None:
    """Return an entry as far as it is one: a name that a node can have, a time that may be, a reason of a line."""
    name, reason, until = record.get("node"), str(record.get("reason") or ""), number(record.get("until"))
    if not isinstance(name, str) or not NODE.fullmatch(name) or until is None:
        return None
    told = visible(" ".join(reason.split()))[:MOST_TEXT]
    by = "" if owner in (os.getuid(), 0) else _user(owner)  # root may keep nodes from everybody as it is
    return BadNode(name, told, min(until, now + MOST_HOURS * 3600), str(record.get("run") or "")[:MOST_TEXT], by)


def _is_plain(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1


def _user(uid: int) -> str:
    if uid < 0:
        return "somebody"
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def bad_nodes_of(run: Run, cluster: Cluster) -> BadNodes:
    """Return the list that a Run's cluster keeps: where its file says, else beside the Runs.

    Where others may write, in a folder that the cluster file names or because the Runs are a team's, they have files of
    their own in it, and nobody can remove another one's (the sticky bit).
    """
    if cluster.state_dir:
        return BadNodes(Path(cluster.state_dir), 0o1777)
    try:
        others = run.root.parent.stat().st_mode & 0o022
    except OSError:
        others = 0
    return BadNodes(run.root.parent / f".{cluster.name}", 0o1777 if others else 0o755)
