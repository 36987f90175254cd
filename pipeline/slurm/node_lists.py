"""Slurm's compact lists of nodes, written out: `gpu[001-003,007]`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import product

from pipeline.config.yaml12 import shown
from pipeline.errors import UserError

SHORT = 100  # characters of a list that a sentence can hold
MOST = 100_000  # nodes; a slip like n[0-99999999] must not fill the memory
PART = re.compile(r"([^\[\],\s]+)|\[([^\[\]]*)\]")
RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def expand_node_list(text: str) -> list[str]:
    """Write out a list of nodes in the order and spelling of `scontrol show hostnames`; UserError for a broken one."""
    names = [name for item in _items(text) for name in _expand(item, text)]
    if not names:
        raise _broken(text)
    return names


def few_nodes(nodes: str | Sequence[str], most: int = 6) -> str:
    """Name some of the nodes in a sentence, and say how many more there are; short lists are left as they are."""
    if isinstance(nodes, str) and len(nodes) <= SHORT:
        return nodes
    try:
        names = expand_node_list(nodes) if isinstance(nodes, str) else list(nodes)
    except UserError:
        return f"{nodes[:SHORT]}…"
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most:,} more"


def _broken(text: str) -> UserError:
    return UserError(f"{shown(text)} is not a list of nodes; write for example n1,n[03-05]")


def _items(text: str) -> Iterator[str]:
    """Split at the commas outside of brackets."""
    depth, start = 0, 0
    for index, character in enumerate(text):
        depth += {"[": 1, "]": -1}.get(character, 0)
        if depth not in (0, 1):
            raise _broken(text)
        if character == "," and depth == 0:
            yield text[start:index]
            start = index + 1
    if depth:
        raise _broken(text)
    yield text[start:]


def _expand(item: str, text: str) -> Iterator[str]:
    choices: list[list[str]] = []
    size, end = 1, 0
    for part in PART.finditer(item):
        if part.start() != end:
            raise _broken(text)
        end = part.end()
        choices.append([part[1]] if part[1] else list(_numbers(part[2], text)))
        size *= len(choices[-1])
    if end != len(item) or not choices or not item[0].isalnum() or size > MOST:
        raise _broken(text)
    yield from map("".join, product(*choices))


def _numbers(ranges: str, text: str) -> Iterator[str]:
    for item in ranges.split(","):
        shape = RANGE.fullmatch(item)
        if shape is None:
            raise _broken(text)
        first, last = int(shape[1]), int(shape[2] or shape[1])
        if last < first or last - first >= MOST:
            raise _broken(text)
        for number in range(first, last + 1):
            yield str(number).zfill(len(shape[1]))
