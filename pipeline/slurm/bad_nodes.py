"""Nodes that failed an attempt, with reason and expiry, in a file that all Runs of a cluster may share."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from pipeline.cluster.schema import Cluster
from pipeline.files import append_line
from pipeline.run.folder import Run
from pipeline.run.records import number, read_records

WITHDRAWN = "withdrawn"


@dataclass(frozen=True)
class BadNode:
    name: str
    reason: str
    until: float  # unix s
    run: str  # that it failed


class BadNodes:
    """A file of JSON lines; each node counts until its time is over. Lines are only added, so many may write."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, names: list[str], reason: str, hours: float, run: str) -> None:
        """Keep off these nodes for `hours` from now."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        until = time.time() + hours * 3600
        for name in names:
            append_line(self.path, {"node": name, "reason": reason, "until": until, "run": run})

    def withdraw(self, names: list[str], run: str) -> None:
        """Take back what `run` has said of these nodes; what other Runs say of them stays."""
        for name in names:
            append_line(self.path, {"node": name, "reason": WITHDRAWN, "until": 0, "run": run})

    def read(self, now: float | None = None) -> dict[str, BadNode]:
        """Return those that count now, by name."""
        now, words = now or time.time(), list[BadNode]()
        for record in read_records(self.path):
            until = number(record.get("until")) or 0.0
            node = BadNode(
                str(record.get("node", "")), str(record.get("reason", "")), until, str(record.get("run", ""))
            )
            if record.get("reason") == WITHDRAWN:
                words = [word for word in words if (word.name, word.run) != (node.name, node.run)]
            elif until > now and isinstance(record.get("node"), str):
                words.append(node)
        return {node.name: node for node in words}


def bad_nodes_of(run: Run, cluster: Cluster) -> BadNodes:
    """Return the list that a Run's cluster keeps: where its file says, else beside the Runs."""
    folder = Path(cluster.state_dir) if cluster.state_dir else run.root.parent / f".{cluster.name}"
    return BadNodes(folder / "bad_nodes.jsonl")
