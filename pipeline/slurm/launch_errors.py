"""The nodes that Slurm itself names in a step's log as those that could not start or went away."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from pipeline.errors import UserError
from pipeline.slurm.node_lists import expand_node_list

# As srun says it since 20.11 (step_launch.c, allocate.c, slurm_protocol_api.c). What it says about a task that exited
# is not among them: that is the program's own matter. Nor is "STEP 7.0 ON n1 CANCELLED … DUE TO NODE FAILURE", where n1
# is the first node of the step, and not the one that failed.
SAYS = re.compile(
    r"^(?:\d+: )?srun: error: (?:"
    r"Task launch for \S+ failed on node (?P<launch>[^\s:]+): (?P<why>.*)"
    r"|Node failure on (?P<failed>\S+)"
    r"|Nodes (?P<unready>\S+) are still not ready"
    r"|\w+: \[\[(?P<silent>[^\]\s]+)\]:\d+\] failed: (?P<said>.*))$",
    re.M,
)


class NamedNode(NamedTuple):
    """A node and what Slurm said of it."""

    name: str
    text: str


def nodes_named(log: str) -> list[NamedNode]:
    """Return the nodes that srun names as failed, each once with the first that was said of it."""
    found: dict[str, str] = {}
    for match in SAYS.finditer(log):
        nodes = next(filter(None, map(match.group, ("launch", "failed", "unready", "silent"))))
        text = match["why"] or match["said"] or ("node failure" if match["failed"] else "still not ready")
        for name in _names(nodes):
            found.setdefault(name, text.strip()[:200])
    return [NamedNode(name, text) for name, text in found.items()]


def _names(text: str) -> Iterator[str]:
    try:
        yield from expand_node_list(text)
    except UserError:  # a line that was torn
        return
