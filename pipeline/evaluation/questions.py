"""Questions from files of JSON lines: multiple choice, and cloze, which has one continuation, the target.

    {"context": "A stack takes away what came", "choices": [" last", " first"], "answer": 0}      multiple_choice
    {"context": "The opposite of hot is", "target": " cold"}                                       cloze

A continuation begins with the blank that belongs to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import UserError
from pipeline.text_files import check_unicode, read_objects

EXAMPLES = {
    "multiple_choice": '{"context": "1 + 1 =", "choices": [" 2", " 3"], "answer": 0}',
    "cloze": '{"context": "1 + 1 =", "target": " 2"}',
}


@dataclass(frozen=True)
class Question:
    """A context, continuations of it, and which one is right; a cloze has one, which is the target."""

    context: str
    choices: tuple[str, ...]
    answer: int


def read_questions(path: Path, kind: str) -> list[Question]:
    """Read a file of questions; UserError names the line and what is wrong with it."""
    questions = [_question(record, where, kind) for where, record in read_objects(path, EXAMPLES[kind])]
    if not questions:
        raise UserError(f"{path}: holds no question; write one a line, such as {EXAMPLES[kind]}")
    return questions


def _question(record: dict[str, Any], where: str, kind: str) -> Question:
    advice = f"; write for example {EXAMPLES[kind]}"
    context, target = record.get("context"), record.get("target")
    if not isinstance(context, str):
        raise UserError(f'{where}: has no "context" that is a text{advice}')
    if kind == "cloze":
        if not isinstance(target, str) or not target:
            raise UserError(f'{where}: has no "target" that is a text{advice}')
        question = Question(context, (target,), 0)
    else:
        choices, answer = record.get("choices"), record.get("answer")
        if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(c, str) and c for c in choices):
            raise UserError(f'{where}: needs "choices", a list of two or more texts{advice}')
        if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(choices):
            raise UserError(f'{where}: needs "answer", the place of the right choice: 0 to {len(choices) - 1}')
        question = Question(context, tuple(choices), answer)
    for text in (question.context, *question.choices):
        check_unicode(text, where)
    return question
