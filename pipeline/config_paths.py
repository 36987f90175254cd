"""The paths in a config: `~` and variables expanded, made absolute, and looked at before anything is submitted."""

from __future__ import annotations

import glob
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

from pipeline.config import Config
from pipeline.config_evaluate import PYTHON_DOCS, BenchmarkSource
from pipeline.config_sources import folder_suffixes, in_folder, kind_of, known_suffixes, walk
from pipeline.config_tokenize import HUB, STDLIB, DataSource
from pipeline.config_types import has_control_characters
from pipeline.errors import UserError
from pipeline.hugging_face import check_folder
from pipeline.prompts import read_prompts
from pipeline.questions import read_questions
from pipeline.yaml12 import KeyPath, shown

VARIABLE = re.compile(r"\$(?:(\$)|([A-Za-z_][A-Za-z0-9_]*)|\{([A-Za-z_][A-Za-z0-9_]*)\})?")
HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?")
URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
FILE_TYPES = {".txt", ".md", ".jsonl", ".json", ".parquet", ".gz", ".zst", ".csv", ".py", ".model"}

Problem = tuple[KeyPath, str]


class PathError(ValueError):
    """A path that cannot be used; says why and what to do."""


def resolve_paths(config: Config, folder: Path) -> tuple[Config, list[Problem]]:
    """Return the Config with paths as they are on this machine, and what is wrong with those left as they were."""
    problems: list[Problem] = []

    def attempt(path: KeyPath, text: str, find: Callable[[str], str]) -> str:
        try:
            return find(text)
        except PathError as error:
            problems.append((path, f"{shown(text)} {error}"))
            return text

    def source(number: int, old: DataSource) -> DataSource:
        if old.path is not None:
            new = attempt(("data", number, "path"), old.path, lambda text: find_text(text, folder))
            return old.model_copy(update={"path": new})
        new = attempt(("data", number, "dataset"), old.dataset or "", lambda text: find_dataset(text, folder))
        return old.model_copy(update={"dataset": new})

    def benchmark(number: int, old: BenchmarkSource) -> BenchmarkSource:
        if old.path is None or old.path == PYTHON_DOCS:
            return old
        key = ("evaluate", "benchmarks", number, "path")
        new = attempt(key, old.path, lambda text: find_questions(text, folder, old.kind))
        return old.model_copy(update={"path": new})

    data = [source(number, old) for number, old in enumerate(config.data)]
    tokenize, tokenizer = config.tokenize, config.tokenize.tokenizer
    if tokenizer is not None:
        new = attempt(("tokenize", "tokenizer"), tokenizer, lambda text: find_file(text, folder))
        tokenize = tokenize.model_copy(update={"tokenizer": new})
    benchmarks = [benchmark(number, old) for number, old in enumerate(config.evaluate.benchmarks)]
    evaluate = config.evaluate.model_copy(update={"benchmarks": benchmarks})
    pretrain, init_from = config.pretrain, config.pretrain.init_from
    if init_from is not None:
        new = attempt(("pretrain", "init_from"), init_from, lambda text: find_model(text, folder, config))
        pretrain = pretrain.model_copy(update={"init_from": new})
    inference, prompts = config.inference, config.inference.prompts_file
    if prompts is not None:
        new = attempt(("inference", "prompts_file"), prompts, lambda text: find_prompts(text, folder))
        inference = inference.model_copy(update={"prompts_file": new})
    runs_dir = attempt(("runs_dir",), config.runs_dir, expand)  # relative: the caller's matter
    changes = {
        "data": data,
        "tokenize": tokenize,
        "pretrain": pretrain,
        "evaluate": evaluate,
        "inference": inference,
        "runs_dir": runs_dir,
    }
    return config.model_copy(update=changes), problems


def find_model(text: str, folder: Path, config: Config) -> str:
    """Return the absolute path of a folder that holds a model of the config's shape."""
    path = folder / expand(text)
    if _look(path) != "folder":
        raise PathError(f"is no folder here: {path}; name one in Hugging Face's form")
    try:
        check_folder(path, config.model, config.tokenize.vocab_size)
    except UserError as error:
        raise PathError(str(error)) from None
    return str(path)


def find_prompts(text: str, folder: Path) -> str:
    """Return the absolute path of a file of prompts, which is read through for mistakes."""
    path = find_file(text, folder)
    try:
        read_prompts(Path(path))
    except UserError as error:
        raise PathError(f"cannot be used: {error}") from None
    return path


def find_questions(text: str, folder: Path, kind: str) -> str:
    """Return the absolute path of a Benchmark: a file of questions, read through for mistakes, or lm_eval's folder."""
    if kind == "lm_eval":
        return find_folder(text, folder)
    path = find_file(text, folder)
    try:
        read_questions(Path(path), kind)
    except UserError as error:
        raise PathError(f"cannot be used: {error}") from None
    return path


def expand(text: str) -> str:
    """Replace a leading `~` or `~user`, and `$NAME` and `${NAME}` anywhere; `$$` is a dollar sign."""
    home, slash, rest = text.partition("/")
    if home.startswith("~"):
        home = os.path.expanduser(home)
        if not os.path.isabs(home):
            raise PathError("begins with ~, but there is no such home folder here; write the whole path")
    else:
        home = VARIABLE.sub(_value, home)
    path = home + slash + VARIABLE.sub(_value, rest)
    if has_control_characters(path):
        raise PathError("holds control characters or broken UTF-8 once its variables are filled in; mend them")
    return path


def _value(match: re.Match[str]) -> str:
    if match[1]:
        return "$"
    name = match[2] or match[3]
    if name is None:
        raise PathError("has a $ that begins no variable; write $NAME or ${NAME}, or $$ for a dollar sign")
    value = os.environ.get(name, "")
    if not value:  # an empty one would make /data of $ROOT/data
        raise PathError(f"uses the variable {name}, which is not set; set it, or write the whole path")
    return value


def find_text(text: str, folder: Path) -> str:
    """Return the absolute path of a file or folder, or an absolute glob that matches something."""
    if text == STDLIB:
        return text
    refuse_other_sources(text)
    expanded = expand(text)
    path = folder / expanded
    if (kind := _look(path)) is not None:
        _refuse_without_text(path, kind)
        return str(path)
    if not glob.has_magic(expanded):
        advice = f"for a dataset on the Hugging Face hub write {HUB}{text}" if _could_be_hub(text) else "mend the path"
        raise PathError(f"is not there: no file or folder {path}; {advice}")
    pattern = expanded if os.path.isabs(expanded) else os.path.join(glob.escape(str(folder)), expanded)
    number = 0
    try:
        for name in glob.iglob(pattern, recursive=True):
            number += 1
            if kind_of(Path(name)) and os.path.isfile(name):
                return pattern
    except (OSError, ValueError, re.error, RecursionError) as error:
        raise PathError(f"cannot be searched: {error}; mend the pattern") from None
    if number:
        raise PathError(f"matches {number} names, but no file of a known kind: {known_suffixes()}")
    raise PathError(f"matches no file: {pattern}; mend the pattern, or put the files there")


def _refuse_without_text(path: Path, kind: str) -> None:
    """Raise PathError where nothing would be read."""
    if kind == "file" and kind_of(path) is None:
        raise PathError(f"is a file of an unknown kind; known: {known_suffixes()}")
    if kind == "folder" and not any(map(in_folder, walk(path))):
        raise PathError(f"holds no text: {folder_suffixes()}")


def refuse_other_sources(text: str) -> None:
    """Raise PathError for a source that is no path."""
    if text.startswith(HUB):
        raise PathError(f"is a dataset, not a path; write `dataset: {text.removeprefix(HUB)}`")
    if URL.match(text):
        raise PathError("is a URL, which is not read; download it, or for a dataset on the hub write hf:owner/name")


def is_hub_name(text: str) -> bool:
    """Tell a dataset's name on the hub from a folder, which begins with one of . / ~ $."""
    return text[:1] not in (".", "/", "~", "$")


def _could_be_hub(text: str) -> bool:
    return "/" in text and HUB_NAME.fullmatch(text) is not None and Path(text).suffix not in FILE_TYPES


def find_dataset(text: str, folder: Path) -> str:
    """Return a dataset's name on the hub as it is, and a folder (which begins with one of . / ~ $) absolute."""
    if is_hub_name(text):
        if HUB_NAME.fullmatch(text):
            return text
        raise PathError("is not a dataset on the hub; write owner/name, or ./ before the name of a folder")
    path = folder / expand(text)
    kind = _look(path)
    if kind is None:
        raise PathError(f"is not there: no folder {path}; mend the path")
    if kind != "folder":
        raise PathError("is a file, not a folder of a dataset; write it as `path`")
    return str(path)


def find_file(text: str, folder: Path) -> str:
    """Return the absolute path of a file that must be there."""
    path = folder / expand(text)
    kind = _look(path)
    if kind is None:
        raise PathError(f"is not there: no file {path}; mend the path")
    if kind != "file":
        raise PathError("is a folder, and a file is needed; name a file in it")
    return str(path)


def find_folder(text: str, folder: Path) -> str:
    """Return the absolute path of a folder that must be there."""
    path = folder / expand(text)
    kind = _look(path)
    if kind is None:
        raise PathError(f"is not there: no folder {path}; mend the path")
    if kind != "folder":
        raise PathError("is a file, and a folder is needed; name the one that it is in")
    return str(path)


def _look(path: Path) -> str | None:
    """Return `file`, `folder` or, where nothing is there, None; PathError for what cannot be read."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        if path.is_symlink():
            raise PathError("is a link to something that is not there; mend the link") from None
        return None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise PathError(f"cannot be looked at: {reason}; mend the path or its permissions") from None
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise PathError("is neither a file nor a folder; save its text to a file first")
    if not os.access(path, os.R_OK | (os.X_OK if stat.S_ISDIR(mode) else 0)):
        raise PathError("may not be read by you; ask for permission, or mend it with chmod")
    return "folder" if stat.S_ISDIR(mode) else "file"
