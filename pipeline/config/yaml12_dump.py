"""Write YAML that readers of YAML 1.1 and of YAML 1.2 understand alike."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")  # text that no YAML version takes for anything else …
WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}  # … except these


def dump(value: dict[str, Any]) -> str:
    """Write `value` (text, numbers, booleans, None, lists, mappings) as YAML that 1.1 and 1.2 readers read alike."""
    return "".join(f"{line}\n" for line in _mapping(value))


def _mapping(value: dict[str, Any]) -> Iterator[str]:
    for key, item in value.items():
        if isinstance(item, dict) and item:
            yield f"{_text(key)}:"
            yield from (f"  {line}" for line in _mapping(item))
        elif isinstance(item, list | tuple) and item:
            yield f"{_text(key)}:"
            for element in item:
                yield from _element(element)
        else:
            yield f"{_text(key)}: {dump_scalar(item)}"


def _element(value: Any) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for number, line in enumerate(_mapping(value)):
            yield f"    {line}" if number else f"  - {line}"
    elif isinstance(value, list | tuple) and value:
        raise TypeError("a list in a list has no place in a config")
    else:
        yield f"  - {dump_scalar(value)}"


def dump_scalar(value: Any) -> str:
    """Write one value, in quotes where a reader could take it for something else."""
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        text = repr(value)  # YAML 1.1 wants the dot: 1e-05 is text there, 1.0e-05 is not
        return text if "." in text else text.replace("e", ".0e")
    if isinstance(value, int):
        return str(value)
    if value is None:
        return "null"
    return "{}" if isinstance(value, dict) else "[]"


def _text(text: str) -> str:
    if PLAIN.fullmatch(text) and text.lower() not in WORDS:
        return text
    return '"' + "".join(map(_escaped, text)) + '"'


def _escaped(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    if character in "\n\t":
        return {"\n": "\\n", "\t": "\\t"}[character]
    if character.isprintable():
        return character
    return f"\\u{ord(character):04x}" if ord(character) < 0x10000 else f"\\U{ord(character):08x}"
