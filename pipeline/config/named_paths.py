"""The keys of a Config that name files, folders and datasets outside the Run: one list for all who look at them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from pipeline.config.evaluate import PYTHON_DOCS
from pipeline.config.schema import Config
from pipeline.config.tokenize import STDLIB
from pipeline.config.yaml12 import KeyPath, shown

Problem = tuple[KeyPath, str]


class PathError(ValueError):
    """A path that cannot be used; says why and what to do."""


class NamedPath(NamedTuple):
    """One value that names a place. `kind` is what lies there.

    text: documents, as a file, folder or glob. dataset: a name on the hub, or a folder. tokenizer, prompts: files.
    multiple_choice, cloze: files of questions. lm_eval, model: folders.
    """

    key: KeyPath
    text: str
    kind: str


def named_paths(config: Config) -> Iterator[NamedPath]:
    """List the values that name a place; not what is a part of Python."""
    for number, source in enumerate(config.data):
        if source.path is None:
            yield NamedPath(("data", number, "dataset"), source.dataset or "", "dataset")
        elif source.path != STDLIB:
            yield NamedPath(("data", number, "path"), source.path, "text")
    if config.tokenize.tokenizer is not None:
        yield NamedPath(("tokenize", "tokenizer"), config.tokenize.tokenizer, "tokenizer")
    if config.pretrain.init_from is not None:
        yield NamedPath(("pretrain", "init_from"), config.pretrain.init_from, "model")
    for number, benchmark in enumerate(config.evaluate.benchmarks):
        if benchmark.path not in (None, PYTHON_DOCS):
            yield NamedPath(("evaluate", "benchmarks", number, "path"), benchmark.path or "", benchmark.kind)
    if config.inference.prompts_file is not None:
        yield NamedPath(("inference", "prompts_file"), config.inference.prompts_file, "prompts")


def resolve(
    config: Config, find: Callable[[NamedPath], str], find_runs_dir: Callable[[str], str]
) -> tuple[Config, list[Problem]]:
    """Return the Config with each place as `find` has it, and what is wrong with those left as they were."""
    problems: list[Problem] = []
    for path in [*named_paths(config), NamedPath(("runs_dir",), config.runs_dir, "runs")]:
        try:
            new = find_runs_dir(path.text) if path.kind == "runs" else find(path)
        except PathError as error:
            problems.append((path.key, f"{shown(path.text)} {error}"))
        else:
            config = _replace(config, path.key, new)
    return config, problems


def _replace(section: Any, key: KeyPath, value: str) -> Any:
    """Return a section, or a list of them, with one value changed."""
    if not key:
        return value
    first, rest = key[0], key[1:]
    if isinstance(section, list):
        return [_replace(item, rest, value) if number == first else item for number, item in enumerate(section)]
    return section.model_copy(update={first: _replace(getattr(section, str(first)), rest, value)})
