"""Text files that a person gives: UTF-8, by lines or JSON lines; each mistake is named with its place.

Lines end at "\\n" alone: other characters that Python takes for the end of a line may stand in a JSON text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeline.errors import UserError


def read_text_lines(path: Path) -> list[str]:
    """Read the lines of a file; UserError where it cannot be read, or is not UTF-8."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read: {error.strerror or error}; check the name and its permissions"
        ) from None
    return as_text(content, str(path)).split("\n")


def read_objects(path: Path, example: str) -> list[tuple[str, dict[str, Any]]]:
    """Read a file of JSON objects, one a line, each with its place (`file:line`); blank lines are passed over."""
    return objects_of(read_text_lines(path), str(path), example)


def objects_of(lines: list[str], where: str, example: str) -> list[tuple[str, dict[str, Any]]]:
    """Read lines of JSON objects, each with its place; blank lines are passed over."""
    return [
        (f"{where}:{number}", _object(line, f"{where}:{number}", example))
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]


def _object(line: str, where: str, example: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON ({error}); each line is an object, such as {example}") from None
    if not isinstance(record, dict):
        raise UserError(f"{where}: no JSON object; write for example {example}")
    return record


def as_text(content: bytes, where: str) -> str:
    """Decode UTF-8; UserError with the place of the first byte that is none."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{where}:{line}: byte {error.start} ({content[error.start]:#04x}) is not UTF-8; convert the text first"
        ) from None


def check_unicode(text: str, where: str) -> None:
    """Raise UserError for half a character, which JSON can write (`\\ud800`) and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where}: not valid Unicode: a lone surrogate at character {error.start}; write the whole character"
        ) from None
