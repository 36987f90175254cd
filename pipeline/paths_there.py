"""The paths in a config whose Run is elsewhere: looked at there, by one call, before anything is submitted."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from pipeline.config import STDLIB, Config
from pipeline.config_paths import PathError, Problem, expand, find_dataset, is_hub_name, refuse_other_sources
from pipeline.errors import NotReadyError
from pipeline.slurm import Slurm
from pipeline.yaml12 import KeyPath, shown

# One word for each path, in their order. A path is an argument and never part of the text.
LOOK = """
for path; do
    if test -d "$path" -a -r "$path" -a -x "$path"; then echo folder
    elif test -f "$path" -a -r "$path"; then echo file
    elif test -e "$path"; then echo unreadable
    else echo missing
    fi
done
"""


class _Path(NamedTuple):
    key: KeyPath
    text: str
    kinds: tuple[str, ...]  # that it may be: file, folder


def resolve_there(config: Config, slurm: Slurm) -> tuple[Config, list[Problem]]:
    """Return the Config with its `runs_dir` as it is here, and what is wrong with the paths that are read there."""
    problems: list[Problem] = []

    def attempt(key: KeyPath, text: str, find: Callable[[str], str]) -> str:
        try:
            return find(text)
        except PathError as error:
            problems.append((key, f"{shown(text)} {error}"))
            return text

    runs_dir = attempt(("runs_dir",), config.runs_dir, expand)
    paths = []
    for path in _paths(config):
        before = len(problems)
        attempt(path.key, path.text, _absolute)
        if len(problems) == before:
            paths.append(path)
    for number, source in enumerate(config.data):
        if source.dataset is not None and is_hub_name(source.dataset):
            attempt(("data", number, "dataset"), source.dataset, lambda text: find_dataset(text, Path("/")))
    problems += _problems(paths, slurm)
    return config.model_copy(update={"runs_dir": runs_dir}), problems


def _paths(config: Config) -> list[_Path]:
    """List all that a Run reads from disk."""
    found = []
    for number, source in enumerate(config.data):
        if source.path is not None and source.path != STDLIB:
            kinds = ("folder",) if glob.has_magic(source.path) else ("file", "folder")
            found.append(_Path(("data", number, "path"), source.path, kinds))
        elif source.dataset is not None and not is_hub_name(source.dataset):
            found.append(_Path(("data", number, "dataset"), source.dataset, ("folder",)))
    if config.tokenize.tokenizer is not None:
        found.append(_Path(("tokenize", "tokenizer"), config.tokenize.tokenizer, ("file",)))
    return found


def _absolute(text: str) -> str:
    refuse_other_sources(text)
    if not text.startswith("/"):
        raise PathError(
            "is read on the cluster, where this machine's folders and variables mean nothing; copy the text there, and "
            "write its whole path over there, from / on"
        )
    return text


def _problems(paths: Sequence[_Path], slurm: Slurm) -> list[Problem]:
    if not paths:
        return []
    looked = [_fixed_part(path.text) for path in paths]
    said = slurm.run(["sh", "-c", LOOK, "sh", *looked]).split()
    if len(said) != len(paths):
        raise NotReadyError(f"login.prefix: asked for {len(paths)} paths, and this came back: {' '.join(said)[:200]}")
    problems = []
    for path, place, kind in zip(paths, looked, said, strict=True):
        if kind in path.kinds:
            continue
        if kind == "missing":
            here = "; this machine has it: copy it there" if os.path.exists(place) else "; copy it there"
            problem = f"is not there on the cluster{here}, or mend the path"
        elif kind == "unreadable":
            problem = "may not be read by you on the cluster; ask for permission, or mend it with chmod"
        else:
            problem = f"is a {kind} on the cluster, and a {' or '.join(path.kinds)} is needed; mend the path"
        problems.append((path.key, f"{shown(path.text)} {problem}"))
    return problems


def _fixed_part(text: str) -> str:
    """Return the folder that a glob begins in, or the path itself."""
    parts = PurePosixPath(text).parts
    fixed = [part for number, part in enumerate(parts) if not any(map(glob.has_magic, parts[: number + 1]))]
    return str(PurePosixPath(*fixed))
