"""The paths in a config whose Run is elsewhere: looked at there, by one call, before anything is submitted."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from pipeline.config import Config
from pipeline.config_evaluate import PYTHON_DOCS
from pipeline.config_paths import PathError, Problem, expand, find_dataset, is_hub_name, refuse_other_sources
from pipeline.config_tokenize import STDLIB, DataSource
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
    """Return the Config with paths as they are, `runs_dir` here and the others there, and what is wrong with them."""
    problems: list[Problem] = []

    def attempt(key: KeyPath, text: str, find: Callable[[str], str]) -> str:
        try:
            return find(text)
        except PathError as error:
            problems.append((key, f"{shown(text)} {error}"))
            return text

    def to_look_at(key: KeyPath, text: str, *kinds: str) -> str:
        before = len(problems)
        path = attempt(key, text, _absolute)
        if len(problems) == before:
            paths.append(_Path(key, path, kinds))
        return path

    def source(number: int, old: DataSource) -> DataSource:
        if old.path is not None:
            kinds = ("folder",) if glob.has_magic(old.path) else ("file", "folder")
            path = old.path if old.path == STDLIB else to_look_at(("data", number, "path"), old.path, *kinds)
            return old.model_copy(update={"path": path})
        key, name = ("data", number, "dataset"), old.dataset or ""
        if is_hub_name(name):
            return old.model_copy(update={"dataset": attempt(key, name, lambda text: find_dataset(text, Path("/")))})
        return old.model_copy(update={"dataset": to_look_at(key, name, "folder")})

    paths: list[_Path] = []
    runs_dir = attempt(("runs_dir",), config.runs_dir, expand)
    data = [source(number, old) for number, old in enumerate(config.data)]
    tokenize = config.tokenize
    if tokenize.tokenizer is not None:
        path = to_look_at(("tokenize", "tokenizer"), tokenize.tokenizer, "file")
        tokenize = tokenize.model_copy(update={"tokenizer": path})
    benchmarks = []
    for number, old in enumerate(config.evaluate.benchmarks):
        if old.path not in (None, PYTHON_DOCS):
            kind = "folder" if old.kind == "lm_eval" else "file"
            key = ("evaluate", "benchmarks", number, "path")
            old = old.model_copy(update={"path": to_look_at(key, old.path, kind)})
        benchmarks.append(old)
    evaluate = config.evaluate.model_copy(update={"benchmarks": benchmarks})
    pretrain, inference = config.pretrain, config.inference
    if pretrain.init_from is not None:  # what is in it is looked at over there
        path = to_look_at(("pretrain", "init_from"), pretrain.init_from, "folder")
        pretrain = pretrain.model_copy(update={"init_from": path})
    if inference.prompts_file is not None:
        path = to_look_at(("inference", "prompts_file"), inference.prompts_file, "file")
        inference = inference.model_copy(update={"prompts_file": path})
    problems += _problems(paths, slurm)
    changes = {
        "data": data,
        "tokenize": tokenize,
        "pretrain": pretrain,
        "evaluate": evaluate,
        "inference": inference,
        "runs_dir": runs_dir,
    }
    return config.model_copy(update=changes), problems


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
