"""Which bad nodes a Job is kept off: all of them, unless too few others were left for it to start on.

A Job that excludes more nodes than its partition can spare would wait for ever, and nobody would be there to decide.
So Slurm is asked before, by `sbatch --test-only`, which knows partitions, constraints, GRES, and nodes that are down.
Nodes that failed longest ago are allowed again first; preflight looks at them once more before any training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from pipeline.errors import UserError
from pipeline.slurm.bad_nodes import BadNode
from pipeline.slurm.commands import Slurm
from pipeline.slurm.errors import SlurmError, SlurmRefused
from pipeline.slurm.node_lists import expand_node_list
from pipeline.slurm.options import option_words

OPTION = "exclude"
TOLD = 6  # nodes that are named with their reasons


class Exclusion(NamedTuple):
    """Names that a Job is kept off, and the bad nodes that it may have all the same."""

    names: list[str]
    allowed: list[BadNode]

    def words(self) -> str:
        """Say which bad nodes may be used again, and why."""
        told = ", ".join(f"{node.name} ({node.reason})" for node in self.allowed[:TOLD])
        told += f" and {len(self.allowed) - TOLD} more" if len(self.allowed) > TOLD else ""
        return f"nodes that failed before may be used again, because too few others are left: {told}"


def exclude(bad: Iterable[BadNode], fits: Callable[[list[str]], bool]) -> Exclusion:
    """Exclude as many of `bad` as fit, those that failed last before others.

    `fits` tells whether the Job could start without these names. Where it could not even start with none excluded, the
    list is not what is in its way, and it stays whole.
    """
    newest = sorted(bad, key=lambda node: (-node.until, node.name))
    names = [node.name for node in newest]
    if not names or fits(names) or not fits([]):
        return Exclusion(sorted(names), [])
    fit, too_many = 0, len(names)
    while too_many - fit > 1:
        middle = (fit + too_many) // 2
        fit, too_many = (middle, too_many) if fits(names[:middle]) else (fit, middle)
    return Exclusion(sorted(names[:fit]), newest[fit:])


def choose_exclusion(slurm: Slurm, flags: Mapping[str, str], script: str, bad: Iterable[BadNode]) -> Exclusion:
    """Ask Slurm how many of the bad nodes a Job with these options of sbatch can do without."""

    def fits(names: list[str]) -> bool:
        try:
            slurm.test_only(option_words(with_excluded(flags, names)), script)
        except SlurmRefused:
            return False
        except SlurmError:
            return True  # no answer is no reason to use a node that failed
        return True

    return exclude(bad, fits)


def own_exclude(flags: Mapping[str, str]) -> list[str]:
    """Return the nodes that the user's own option excludes."""
    text = flags.get(OPTION, "")
    try:
        return expand_node_list(text) if text else []
    except UserError:
        return [text]  # Slurm will say what is wrong with it


def with_excluded(flags: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Return the options with the one --exclude that sbatch takes: the user's own nodes and `names`."""
    found = list(dict.fromkeys([*own_exclude(flags), *names]))
    others = {option: value for option, value in flags.items() if option != OPTION}
    return others | ({OPTION: ",".join(found)} if found else {})
