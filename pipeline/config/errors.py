"""All mistakes of a config at once, each in plain words: where, which key, what is wrong, what to write instead."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from pipeline.config.hints import section_in, unknown_key
from pipeline.config.tokenize import DataSource
from pipeline.config.yaml12 import Document, KeyPath, Place, shown
from pipeline.config.yaml12_dump import dump_scalar
from pipeline.errors import UserError

MAX_SHOWN = 50
VERBS = frozenset("is holds gives needs has must would chooses prints submits looks".split())  # after them, the value


class Mistake(NamedTuple):
    """One mistake. `also` is the dotted key that was probably meant: rules on it would only add noise."""

    place: Place
    key: str
    problem: str
    also: str | None = None

    def __str__(self) -> str:
        return ": ".join(text for text in (str(self.place), self.key, self.problem) if text)


class ConfigError(UserError):
    """Everything that is wrong with a config: how many mistakes, then one a line in the order of the file."""

    def __init__(self, source: str, mistakes: Sequence[Mistake]) -> None:
        self.mistakes = sorted(mistakes, key=lambda m: (m.place.order, m.place.line, m.place.column))
        count = len(self.mistakes)
        lines = [f"{count} mistake{'s' if count > 1 else ''} in {source}:", *map(str, self.mistakes[:MAX_SHOWN])]
        if count > MAX_SHOWN:
            lines.append(f"… and {count - MAX_SHOWN} more")
        super().__init__("\n".join(lines))


class Found(NamedTuple):
    """A value that pydantic refused. `text` is the value as a person wrote it."""

    key: str
    value: Any
    text: str
    field: FieldInfo | None
    context: dict[str, Any]


def explain(model: type[BaseModel], details: ErrorDetails, document: Document) -> Mistake:
    """Translate one of pydantic's errors; places and spellings come from the document."""
    path: KeyPath = details["loc"]
    kind = details["type"]
    if kind == "extra_forbidden":
        problem, also = unknown_key(model, path)
        return Mistake(document.place(path), dotted(document.written(path)), problem, also)
    written = path if kind == "missing" else document.written(path)
    value = details["input"]
    text = _as_written(value, document.raw.get(written))
    found = Found(dotted(written), value, text, _field(model, path), _context(details))
    words = WORDS.get(kind, _unforeseen)
    return Mistake(document.place(path), found.key, (_nothing if value is None else words)(found))


def _context(details: ErrorDetails) -> dict[str, Any]:
    return dict(details.get("ctx", {}))


def dotted(path: KeyPath) -> str:
    """Write a key path for people: `data[0].path`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += ("." if text else "") + (part if part.isprintable() and len(part) <= 60 else shown(part))
    return text


def _as_written(value: Any, raw: str | None) -> str:
    if isinstance(value, str):
        return shown(value)
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    return raw or shown(str(value)).strip("'")


def _field(model: type[BaseModel], path: KeyPath) -> FieldInfo | None:
    """Return the field that `path` lies in."""
    section, names = model, [part for part in path if isinstance(part, str)]
    for number, name in enumerate(names):
        field = section.model_fields.get(name)
        inner = section_in(field.annotation) if field else None
        if field is None or inner is None or number == len(names) - 1:
            return field
        section = inner
    return None


def range_of(field: FieldInfo) -> str:
    """Say which numbers a field takes: `at least 1 and at most 10`; empty where there is no bound."""
    words = []
    for bound in field.metadata:
        if isinstance(bound, annotated_types.Ge):
            words.append(f"at least {_number(bound.ge)}")
        elif isinstance(bound, annotated_types.Gt):
            words.append(f"more than {_number(bound.gt)}")
        elif isinstance(bound, annotated_types.Le):
            words.append(f"at most {_number(bound.le)}")
        elif isinstance(bound, annotated_types.Lt):
            words.append(f"less than {_number(bound.lt)}")
    return " and ".join(words)


def _number(value: Any) -> str:
    return f"{value:.0e}".replace("+", "") if value >= 1e10 else str(int(value) if value == int(value) else value)


def choices_of(annotation: Any) -> list[str]:
    """List the words that a field of fixed choices takes."""
    if get_origin(annotation) is Literal:
        return [str(word) for word in get_args(annotation)]
    return [word for inner in get_args(annotation) for word in choices_of(inner)]


def example_of(field: FieldInfo | None) -> str:
    """Give a value that the field takes: its default, small and large numbers also with an exponent."""
    default = field.default if field else None
    if field is not None and field.examples:
        return str(field.examples[0])
    if isinstance(default, float):
        short = re.sub(r"e([-+])0?", r"e\1", f"{default:.0e}").replace("+", "")
        exponent = default != 0 and not 0.1 <= default < 1000 and float(short) == default
        return f"{default:g} or {short}" if exponent else f"{default:g}"
    if isinstance(default, list | tuple) and default and not isinstance(default[0], BaseModel):
        return "[" + ", ".join(map(dump_scalar, default)) + "]"
    if isinstance(default, str | int):
        return dump_scalar(default)
    if field is not None and section_in(field.annotation) is DataSource:
        return "python-stdlib"
    return "my-model" if field is not None and field.is_required() else "8"


def _nothing(found: Found) -> str:
    field, rule = found.field, str(found.context.get("text", ""))
    if rule.startswith("has no value"):
        return rule
    if field is not None and section_in(field.annotation) not in (None, DataSource):
        return "is an empty section; write keys below it, further in, or remove the line"
    name = found.key.rpartition(".")[2].partition("[")[0]
    is_text = field is not None and "str" in str(field.annotation) and not field.default and not field.examples
    example = "my-model" if name == "name" else "/data/text" if is_text else example_of(field)
    return f"has no value; write for example `{name}: {example}`, or remove the line"


def _missing(found: Found) -> str:
    return f"is missing; write for example `{found.key}: {example_of(found.field)}`"


def _not_whole(found: Found) -> str:
    return f"{found.text} is not a whole number; write for example {example_of(found.field)}"


def _not_number(found: Found) -> str:
    return f"{found.text} is not a number; write for example {example_of(found.field)}"


def _not_finite(found: Found) -> str:
    return f"{found.text} is not a finite number; write for example {example_of(found.field)}"


def _out_of_range(found: Found) -> str:
    rule = range_of(found.field) if found.field else ""
    if not rule:
        words = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
        rule = " and ".join(f"{words[name]} {_number(bound)}" for name, bound in found.context.items() if name in words)
    return f"{found.text} is out of range; it must be {rule}"


def _not_text(found: Found) -> str:
    if isinstance(found.value, dict):
        return "a mapping where text is needed; put quotes around text that holds ': ' or ends with ':'"
    if isinstance(found.value, list):
        return "a list where text is needed; write one value, or put quotes around text that begins with ["
    kind = "true or false" if isinstance(found.value, bool) else "a number"
    return f"{found.text} means {kind} here, and text is needed; put quotes around it: '{found.text}'"


def _not_list(found: Found) -> str:
    if isinstance(found.value, dict) and "str" in str(found.field and found.field.annotation):
        return _not_text(found)
    return f"{found.text} where a list is needed; write for example {example_of(found.field)}"


def _not_mapping(found: Found) -> str:
    return f"{found.text} where names with values are needed; write for example {example_of(found.field)}"


def _not_bool(found: Found) -> str:
    return f"{found.text} is neither true nor false; write true or false, without quotes"


def _not_choice(found: Found) -> str:
    words = choices_of(found.field.annotation) if found.field else []
    return f"{found.text} is not one of {', '.join(words)}; write one of them"


def _not_section(found: Found) -> str:
    if found.field is not None and section_in(found.field.annotation) is DataSource:
        return f"{found.text} is not a source of text; write a path, hf:owner/name, or keys: path, or dataset"
    if isinstance(found.value, str) and ":" in found.value:
        return f"{found.text} is one text, not keys with values; put a blank after the colon: `key: value`"
    return f"{found.text} where keys with values are needed; write them below it, further in"


def _broken_rule(found: Found) -> str:
    text = str(found.context["text"])
    begins_with_verb = text.split(" ", 1)[0] in VERBS
    return f"{found.text} {text}" if begins_with_verb else text


def _not_unicode(found: Found) -> str:
    return "is not valid Unicode text; write it again in UTF-8"


def _unforeseen(found: Found) -> str:
    return f"{found.text} is not possible here; see the reference of this key in docs/config.md"


WORDS: dict[str, Callable[[Found], str]] = {
    "missing": _missing,
    "rule": _broken_rule,
    "int_type": _not_whole,
    "float_type": _not_number,
    "finite_number": _not_finite,
    "greater_than": _out_of_range,
    "greater_than_equal": _out_of_range,
    "less_than": _out_of_range,
    "less_than_equal": _out_of_range,
    "string_type": _not_text,
    "string_unicode": _not_unicode,
    "list_type": _not_list,
    "dict_type": _not_mapping,
    "tuple_type": _not_list,
    "bool_type": _not_bool,
    "literal_error": _not_choice,
    "model_type": _not_section,
}
"""pydantic's error types that a Config can give, besides extra_forbidden; a test derives them from the schema."""
