"""Prompts from files and from standard input."""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.errors import UserError

FIELD = "prompt"
EXAMPLE = '{"prompt": "def "}'


def read_prompts(path: Path) -> list[str]:
    """Read a .jsonl file, each line an object with a `prompt`, or a text file with one prompt a line.

    Raises UserError with the line of the first mistake: no text is ever changed or left out silently.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    lines = as_text(content, str(path)).split("\n")
    if path.suffix == ".jsonl":
        prompts = [_of_json(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    else:
        prompts = [line.removesuffix("\r") for line in lines if line.strip()]
    if not prompts:
        raise UserError(f"{path}: holds no prompt; write one a line")
    return prompts


def as_text(content: bytes, where: str) -> str:
    """Decode UTF-8; UserError with the place of the first byte that is none."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{where}:{line}: byte {error.start} ({content[error.start]:#04x}) is not UTF-8; convert the text first"
        ) from None


def check_prompt(prompt: str, where: str) -> str:
    """Return a prompt that the model can go on from; UserError for an empty one and for half characters."""
    if not prompt:
        raise UserError(f"{where}: an empty prompt; write at least one character for the model to go on from")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: not valid Unicode: a lone surrogate at character {error.start}") from None
    return prompt


def _of_json(line: str, where: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON ({error}); each line is an object, such as {EXAMPLE}") from None
    if not isinstance(record, dict) or not isinstance(record.get(FIELD), str):
        raise UserError(f"{where}: has no text in the field {FIELD}; write {EXAMPLE}")
    return check_prompt(record[FIELD], where)
