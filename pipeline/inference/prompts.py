"""Prompts from files and from standard input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.errors import UserError
from pipeline.text_files import check_unicode, objects_of, read_objects, read_text_lines

FIELD = "prompt"
EXAMPLE = '{"prompt": "def "}'


def read_prompts(path: Path) -> list[str]:
    """Read a .jsonl file, each line an object with a `prompt`, or a text file with one prompt a line.

    Raises UserError with the line of the first mistake: no text is ever changed or left out silently.
    """
    if path.suffix == ".jsonl":
        prompts = [_of_record(record, where) for where, record in read_objects(path, EXAMPLE)]
    else:
        prompts = [line.removesuffix("\r") for line in read_text_lines(path) if line.strip()]
    if not prompts:
        raise UserError(f"{path}: holds no prompt; write one a line")
    return prompts


def read_prompt_lines(text: str) -> list[str]:
    """Read the same JSON lines from standard input."""
    return [_of_record(record, where) for where, record in objects_of(text.split("\n"), "standard input", EXAMPLE)]


def check_prompt(prompt: str, where: str) -> str:
    """Return a prompt that the model can go on from; UserError for an empty one and for half characters."""
    if not prompt:
        raise UserError(f"{where}: an empty prompt; write at least one character for the model to go on from")
    check_unicode(prompt, where)
    return prompt


def _of_record(record: dict[str, Any], where: str) -> str:
    if not isinstance(record.get(FIELD), str):
        raise UserError(f"{where}: has no text in the field {FIELD}; write {EXAMPLE}")
    return check_prompt(record[FIELD], where)
