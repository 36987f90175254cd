"""The paths in a config: `~` and variables expanded, made absolute, and looked at before anything is submitted."""

from __future__ import annotations

import glob
import os
import re
import stat
from pathlib import Path

from pipeline.config.named_paths import NamedPath, PathError, Problem, resolve
from pipeline.config.schema import Config
from pipeline.config.sources import folder_suffixes, in_folder, kind_of, known_suffixes, walk
from pipeline.config.tokenize import HUB
from pipeline.config.types import has_control_characters
from pipeline.errors import UserError
from pipeline.evaluation.questions import read_questions
from pipeline.inference.hugging_face import check_folder
from pipeline.inference.prompts import read_prompts

VARIABLE = re.compile(r"\$(?:(\$)|([A-Za-z_][A-Za-z0-9_]*)|\{([A-Za-z_][A-Za-z0-9_]*)\})?")
HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?")
URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
FILE_TYPES = {".txt", ".md", ".jsonl", ".json", ".parquet", ".gz", ".zst", ".csv", ".py", ".model"}


def resolve_paths(config: Config, folder: Path) -> tuple[Config, list[Problem]]:
    """Return the Config with paths as they are on this machine, and what is wrong with those left as they were."""
    return resolve(config, lambda path: _find(path, folder, config), expand)  # runs_dir, relative: the caller's matter


def _find(path: NamedPath, folder: Path, config: Config) -> str:
    """Return a place of this machine, absolute, after a look at what lies there."""
    if path.kind == "text":
        return find_text(path.text, folder)
    if path.kind == "dataset":
        return find_dataset(path.text, folder)
    if path.kind == "model":
        return find_model(path.text, folder, config)
    if path.kind == "lm_eval":
        return find_there(path.text, folder, "folder")
    found = find_there(path.text, folder, "file")
    try:
        if path.kind == "prompts":
            read_prompts(Path(found))
        elif path.kind != "tokenizer":
            read_questions(Path(found), path.kind)
    except UserError as error:
        raise PathError(f"cannot be used: {error}") from None
    return found


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


def find_there(text: str, folder: Path, kind: str) -> str:
    """Return the absolute path of a `file` or `folder` that must be there."""
    path = folder / expand(text)
    found = _look(path)
    if found is None:
        raise PathError(f"is not there: no {kind} {path}; mend the path")
    if found != kind:
        inside = "name a file in it" if kind == "file" else "name the one that it is in"
        raise PathError(f"is a {found}, and a {kind} is needed; {inside}")
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
