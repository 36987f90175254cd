"""From a YAML file and overrides to a Config, and back."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.config.checks import check
from pipeline.config.errors import ConfigError, Mistake, dotted
from pipeline.config.evaluate import EvaluateConfig
from pipeline.config.hints import section_at
from pipeline.config.named_paths import Problem
from pipeline.config.paths import resolve_paths
from pipeline.config.rules import RULES
from pipeline.config.schema import Config
from pipeline.config.yaml12 import Document, KeyPath, Place, YamlError, load_document, parse_document, shown
from pipeline.config.yaml12_dump import dump

KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*(\.[A-Za-z_][A-Za-z0-9_-]*)*")


Resolve = Callable[[Config, Path], tuple[Config, list[Problem]]]


def load_config(
    path: Path, overrides: Sequence[str] = (), *, folder: Path | None = None, resolve: Resolve = resolve_paths
) -> Config:
    """Read the config at `path`, set the `key.path=value` overrides, and check all of it.

    Relative paths of data, models and files mean `folder`, by default the current one; they come back absolute. A
    relative `runs_dir` stays relative. `resolve` looks for paths where they are to be read, by default on this machine.
    Raises ConfigError with all mistakes at once, or YamlError.
    """
    document = load_document(path)
    mistakes = [*_apply(document, overrides)]
    config, found = check(Config, RULES, document)
    mistakes += found
    if config is not None:
        config, problems = resolve(config, (folder or Path.cwd()).absolute())
        mistakes += [_at(document, key, problem) for key, problem in problems]
    if mistakes or config is None:
        raise ConfigError(document.source, mistakes)
    return config


def load_run_config(path: Path) -> Config:
    """Read a Run's own config.yaml, which `dump_config` wrote: nothing is expanded or looked for on disk."""
    document = load_document(path)
    config, mistakes = check(Config, RULES, document)
    if mistakes or config is None:
        raise ConfigError(document.source, mistakes)
    return config


def dump_config(config: Config) -> str:
    """Write `config` as YAML with every key spelt out; it loads back to an equal Config."""
    value = config.model_dump()
    value["data"] = [{key: item for key, item in source.items() if item is not None} for source in value["data"]]
    return dump(value)


def place_of_key(path: Path, overrides: Sequence[str], key: KeyPath) -> Place:
    """Return where a key of the config at `path` was written, or the nearest that it lies in, for a message."""
    document = load_document(path)
    for _ in _apply(document, overrides):
        pass
    return document.place(key)


def _at(document: Document, path: KeyPath, problem: str) -> Mistake:
    return Mistake(document.place(path), dotted(document.written(path)), problem)


# Overrides


def _apply(document: Document, overrides: Sequence[str]) -> Iterator[Mistake]:
    """Set each override in the document; a later one wins. Yield the mistakes."""
    for order, text in enumerate(overrides, start=1):
        place = Place(f"override {shown(text)}", order=order)
        key, equals, value = text.partition("=")
        path: KeyPath = tuple(key.split("."))
        problem = _misspelt(key, equals, value) or _not_settable(document.data, path)
        if problem:
            yield Mistake(place, key if KEY.fullmatch(key) else "", problem)
            continue
        try:
            _set(document, path, place, parse_document(value, place.source, order=order))
        except YamlError as error:
            yield Mistake(place, key, error.problem)


def _misspelt(key: str, equals: str, value: str) -> str | None:
    if key.startswith("-"):
        return "an override is written without dashes: key.path=value"
    if not equals:
        return "has no `=`; write key.path=value, for example pretrain.max_steps=100"
    if not KEY.fullmatch(key):
        return "has no key before the `=`; write key.path=value, for example pretrain.max_steps=100"
    if not value.strip():
        return "has no value; write one after the `=`, null for none, or '\"\"' for empty text"
    return None


def _not_settable(data: dict[str, Any], path: KeyPath) -> str | None:
    """Say why nothing can be set at `path`: it is a section, or lies in something that is none."""
    section, parent = section_at(Config, path), section_at(Config, path[:-1])
    in_a_list = parent is not None and section is not None and parent.model_fields[str(path[-1])].annotation != section
    if section is not None and not in_a_list:
        return f"is a section; set its keys, for example {path[-1]}.{next(iter(section.model_fields))}=…"
    inner: Any = data
    for number, part in enumerate(path[:-1], start=1):
        inner = inner.get(part)
        if inner is None:
            return None
        if not isinstance(inner, dict):
            kind = "a list" if isinstance(inner, list) else "a single value"
            whole = dotted(path[:number])
            return f"{whole} is {kind} in the file, so no key can be set in it; give all of it: {whole}=…"
    return None


def _set(document: Document, path: KeyPath, place: Place, new: Document) -> None:
    inner = document.data
    for number, part in enumerate(path[:-1], start=1):
        if inner.get(part) is None:
            inner[part] = {}
            document.places[path[:number]] = place
        inner = inner[part]
    inner[path[-1]] = new.data
    for records in (document.places, document.raw):
        for old in [old for old in records if old[: len(path)] == path]:
            del records[old]
    document.places.update({(*path, *inside): place for inside in new.places})
    document.raw.update({(*path, *inside): raw for inside, raw in new.raw.items()})


# Changes of an existing Run

FREE_KEYS = {"threads", "runs_dir"} | {
    f"tokenize.{key}" for key in ("processes", "array_tasks", "max_running_tasks", "max_malformed_share")
} | {
    f"pretrain.{key}"
    for key in (
        "nodes", "time_min", "segments", "nproc_per_node", "micro_batch_size",
        "parallel", "activation_checkpointing", "loss_chunk_size", "compile",
        "peak_tflops", "mfu", "memory_gb", "sinks", "log_interval", "save_interval", "keep_last", "keep_every",
        "on_divergence", "max_rollbacks", "spike_threshold", "spike_window",
        "hang_timeout", "first_step_timeout", "straggler_threshold",
    )
}  # fmt: skip

FREE_SECTIONS = ("preflight.", "inference.")
FREE_OF_EVALUATE = {f"evaluate.{key}" for key in EvaluateConfig.model_fields.keys() - {"stride", "batch_size"}}


class Difference(NamedTuple):
    """A key that has another value than in the Run, and whether the Run can go on with it."""

    key: str
    old: Any
    new: Any
    allowed: bool


def config_differences(old: Config, new: Config) -> list[Difference]:
    """List the keys in which `new` differs from the Config that a Run was made with."""
    before, after = _flat(old.model_dump()), _flat(new.model_dump())
    return [
        Difference(key, before[key], after[key], _allowed(key, before[key], after[key]))
        for key in after
        if before[key] != after[key]
    ]


def _allowed(key: str, old: Any, new: Any) -> bool:
    if key == "pretrain.max_steps":  # downward, checkpoints would lie beyond the end
        return bool(new > old)
    return (
        key in FREE_KEYS
        or key in FREE_OF_EVALUATE
        or key.startswith(FREE_SECTIONS)
        or key.endswith((".time", ".sbatch", ".srun"))
    )


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    """Write sections as dotted keys; a list is one value."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat.update({f"{name}.{key}": item for key, item in value.items()})
        else:
            flat[name] = value
    return flat
