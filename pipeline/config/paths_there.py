"""The paths in a config whose Run is elsewhere: looked at there, by one call, before anything is submitted."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from pipeline.config.named_paths import NamedPath, PathError, Problem, resolve
from pipeline.config.paths import expand, find_dataset, is_hub_name, refuse_other_sources
from pipeline.config.schema import Config
from pipeline.config.yaml12 import shown
from pipeline.errors import NotReadyError
from pipeline.slurm.commands import Slurm

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


def resolve_there(config: Config, slurm: Slurm) -> tuple[Config, list[Problem]]:
    """Return the Config with paths as they are, `runs_dir` here and the others there, and what is wrong with them."""
    paths: list[NamedPath] = []

    def find(path: NamedPath) -> str:
        if path.kind == "dataset" and is_hub_name(path.text):
            return find_dataset(path.text, Path("/"))
        text = _absolute(path.text)
        paths.append(path._replace(text=text))
        return text

    config, problems = resolve(config, find, expand)
    return config, problems + _problems(paths, slurm)


def _kinds(path: NamedPath) -> tuple[str, ...]:
    """Return what a place may be over there; what is in it, only a stage sees."""
    if path.kind == "text":
        return ("folder",) if glob.has_magic(path.text) else ("file", "folder")
    return ("folder",) if path.kind in ("dataset", "model", "lm_eval") else ("file",)


def _absolute(text: str) -> str:
    """Return a path over there as it is; `$$` is a dollar sign, as it is for paths of this machine."""
    refuse_other_sources(text)
    path = text.replace("$$", "")
    if not path.startswith("/") or "$" in path:
        raise PathError(
            "is read on the cluster, where this machine's folders and variables mean nothing; copy the text there, and "
            "write its whole path over there, from / on"
        )
    return text.replace("$$", "$")


def _problems(paths: Sequence[NamedPath], slurm: Slurm) -> list[Problem]:
    if not paths:
        return []
    looked = [_fixed_part(path.text) for path in paths]
    said = slurm.run(["sh", "-c", LOOK, "sh", *looked]).split()
    if len(said) != len(paths):
        raise NotReadyError(f"login.prefix: asked for {len(paths)} paths, and this came back: {' '.join(said)[:200]}")
    problems = []
    for path, place, kind in zip(paths, looked, said, strict=True):
        if kind in _kinds(path):
            continue
        if kind == "missing":
            here = "; this machine has it: copy it there" if os.path.exists(place) else "; copy it there"
            problem = f"is not there on the cluster{here}, or mend the path"
        elif kind == "unreadable":
            problem = "may not be read by you on the cluster; ask for permission, or mend it with chmod"
        else:
            problem = f"is a {kind} on the cluster, and a {' or '.join(_kinds(path))} is needed; mend the path"
        problems.append((path.key, f"{shown(path.text)} {problem}"))
    return problems


def _fixed_part(text: str) -> str:
    """Return the folder that a glob begins in, or the path itself."""
    parts = PurePosixPath(text).parts
    fixed = [part for number, part in enumerate(parts) if not any(map(glob.has_magic, parts[: number + 1]))]
    return str(PurePosixPath(*fixed))
