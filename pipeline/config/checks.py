"""Check a document against its sections and the rules between keys: all mistakes at once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any, Generic, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

from pipeline.config.errors import Mistake, dotted, explain
from pipeline.config.hints import section_in
from pipeline.config.tokenize import STDLIB
from pipeline.config.types import AsTyped, Section
from pipeline.config.yaml12 import Document, KeyPath

AnySection = TypeVar("AnySection", bound=Section)


class Rule(NamedTuple, Generic[AnySection]):
    """`check` is asked only where all `keys` are valid; it returns what is wrong and what to do, or None.

    The first of the keys that the user wrote is where the mistake is shown.
    """

    keys: tuple[str, ...]
    check: Callable[[AnySection], str | None]


class Checked(NamedTuple, Generic[AnySection]):
    """What was read, with defaults in place of invalid keys (None where even that fails), and all mistakes."""

    value: AnySection | None
    mistakes: list[Mistake]


def check(model: type[AnySection], rules: Sequence[Rule[AnySection]], document: Document) -> Checked[AnySection]:
    """Check single keys, then the rules between those that are valid."""
    keep_typed(model, document)
    mistakes: list[Mistake] = []
    invalid: set[str] = set()
    try:
        value = model.model_validate(document.data)
    except ValidationError as error:
        details = error.errors(include_url=False)
        mistakes = [explain(model, detail, document) for detail in details]
        invalid = {".".join(_named(detail["loc"])) for detail in details} | {m.also for m in mistakes if m.also}
        try:
            value = model.model_validate(_without(document.data, [detail["loc"] for detail in details]))
        except ValidationError:
            return Checked(None, mistakes)
    for rule in rules:
        problem = None if _touches(rule.keys, invalid) else rule.check(value)
        if problem is not None:
            paths = [tuple(key.split(".")) for key in rule.keys]
            written = [path for path in paths if path in document.places] or paths
            # An override is what was changed last, so that is where the mistake is.
            path = max(written, key=lambda path: document.place(path).order)
            mistakes.append(Mistake(document.place(path), dotted(path), problem))
    return Checked(value, mistakes)


def _touches(keys: tuple[str, ...], invalid: set[str]) -> bool:
    """Tell whether one of `keys`, or the section that it lies in, is invalid."""
    sections = {key.split(".")[0] for key in keys}
    return not (invalid.isdisjoint(keys) and invalid.isdisjoint(sections))


def keep_typed(model: type[BaseModel], document: Document, path: KeyPath = ()) -> None:
    """Put the text that was typed in place of the numbers and booleans in fields that are marked AsTyped."""
    section: Any = document.data
    for part in path:
        section = section.get(part)
        if not isinstance(section, dict):
            return
    for name, field in model.model_fields.items():
        value, here = section.get(name), (*path, name)
        inner = section_in(field.annotation)
        if inner is not None and isinstance(value, dict):
            keep_typed(inner, document, here)
        elif not any(isinstance(mark, AsTyped) for mark in field.metadata):
            continue
        elif isinstance(value, dict):
            value.update({key: _typed(item, document, (*here, key)) for key, item in value.items()})
        elif name in section:
            section[name] = _typed(value, document, here)


def _typed(value: Any, document: Document, path: KeyPath) -> Any:
    return document.raw.get(path, value) if isinstance(value, bool | int | float) else value


def _named(path: KeyPath) -> list[str]:
    """Return the keys of `path` down to the first list."""
    names = [part for part in takewhile(lambda part: isinstance(part, str), path) if isinstance(part, str)]
    return names[:-1] if names[-1:] == ["[key]"] else names  # so pydantic says that the key itself is meant


def _without(data: dict[str, Any], paths: Sequence[KeyPath]) -> dict[str, Any]:
    """Return a copy of `data` without what is invalid, so that the rest can be checked as well."""
    data = copy.deepcopy(data)
    for path in paths:
        if path == ("name",):
            data["name"] = "unnamed"
        elif path[0] == "data" and len(path) > 1 and isinstance(data.get("data"), list):
            data["data"][path[1]] = STDLIB
        else:
            _remove(data, _named(path))
    return data


def _remove(data: dict[str, Any], names: list[str]) -> None:
    inner: Any = data
    for name in names[:-1]:
        inner = inner.get(name) if isinstance(inner, dict) else None
    if isinstance(inner, dict):
        inner.pop(names[-1], None)
