"""Multiple choice and cloze: which continuation does the model find likeliest?

Context and continuation become tokens apart from each other, so that exactly the bytes of the continuation are scored,
by any tokenizer.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.errors import UserError
from pipeline.evaluation.questions import Question
from pipeline.lm.evaluation import Poll, Values, to
from pipeline.lm.hardware import Hardware
from pipeline.lm.loss import IGNORE_INDEX
from pipeline.lm.model import Transformer
from pipeline.lm.tokenizer import Tokenizer

PADDED_TO = 32  # rows are as long as the longest of their batch, rounded up: few shapes, fast kernels


class QuestionTask:
    """Questions made ready. A batch is `batch_size` rows of whole questions, in the order of the file.

    A question with a continuation longer than the model's context is left out, and counted.
    """

    def __init__(
        self, questions: list[Question], kind: str, tokenizer: Tokenizer, *, size: int, batch_size: int
    ) -> None:
        self.kind, self.size, self.eos = kind, size, tokenizer.eos_id
        encoded = [[tokenizer.encode(text) for text in question.choices] for question in questions]
        fitting = [at for at, texts in enumerate(encoded) if max(map(len, texts)) <= size]
        if not fitting:
            raise UserError(
                f"evaluate.benchmarks: no {kind} question fits: each has a continuation of more than the {size} tokens "
                "of pretrain.sequence_length; give questions with shorter ones"
            )
        self.questions = [questions[at] for at in fitting]
        self.continuations = [encoded[at] for at in fitting]
        self.contexts = [tokenizer.encode(question.context) for question in self.questions]
        self.groups = _groups([len(question.choices) for question in self.questions], batch_size)
        self.batches = len(self.groups)
        self.settings = {"questions": _hash_of(questions), "size": size, "batch_size": batch_size}
        left_out = len(questions) - len(fitting)  # longer than the context
        self.about: dict[str, Any] = {"left_out": left_out, "content_sha256": _hash_of(self.questions)}

    @torch.inference_mode()
    def score(self, model: Transformer, hardware: Hardware, batches: range, poll: Poll) -> Values:
        """Return for each question of these batches what its kind of Score is made of (see score_kinds.py)."""
        names = ("right", "right_normalised") if self.kind == "multiple_choice" else ("right", "nll", "bytes")
        values: Values = {name: [] for name in names}
        for batch in batches:
            group = self.groups[batch]
            nll, greedy = self._likelihoods(model, hardware, group)
            row = 0
            for number in group:
                question = self.questions[number]
                mine = nll[row : row + len(question.choices)]
                sizes = [len(text.encode()) for text in question.choices]
                if self.kind == "multiple_choice":
                    values["right"].append(float(_least(mine) == question.answer))
                    each = [loss / size for loss, size in zip(mine, sizes, strict=True)]
                    values["right_normalised"].append(float(_least(each) == question.answer))
                else:
                    values["right"].append(float(greedy[row]))
                    values["nll"].append(mine[0])
                    values["bytes"].append(sizes[0])
                row += len(question.choices)
            poll()
        return values

    def _likelihoods(self, model: Transformer, hardware: Hardware, group: range) -> tuple[list[float], list[bool]]:
        """Return for each continuation its negative log-likelihood in nats, and whether each token is the likeliest."""
        rows = [self._row(number, ids) for number in group for ids in self.continuations[number]]
        longest = max(len(row) - 1 for row, _ in rows)
        length = min(self.size, -(-longest // PADDED_TO) * PADDED_TO)
        x = np.zeros((len(rows), length), dtype=np.int64)
        y = np.full_like(x, IGNORE_INDEX)
        for at, (row, scored) in enumerate(rows):
            x[at, : len(row) - 1] = row[:-1]
            y[at, len(row) - 1 - scored : len(row) - 1] = row[-scored:]
        targets = to(y, hardware)
        with hardware.autocast():
            logits = model(to(x, hardware)).float()
        kept = targets != IGNORE_INDEX
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="none"
        ).view_as(targets)
        greedy = ((logits.argmax(-1) == targets) | ~kept).all(-1)
        return losses.double().sum(-1).tolist(), greedy.tolist()

    def _row(self, number: int, continuation: NDArray[np.int32]) -> tuple[NDArray[np.int64], int]:
        """Return end token, context (its end, where it is too long) and continuation, and how many are scored."""
        room = self.size - len(continuation)
        context = self.contexts[number][-room:] if room else self.contexts[number][:0]
        return np.concatenate(([self.eos], context, continuation)).astype(np.int64), len(continuation)


def _hash_of(questions: list[Question]) -> str:
    text = json.dumps([[q.context, q.choices, q.answer] for q in questions], ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _groups(rows: list[int], batch_size: int) -> list[range]:
    """Share questions of `rows` rows each out over batches of about `batch_size` rows; none is split."""
    groups, start, filled = [], 0, 0
    for number, count in enumerate(rows):
        if filled and filled + count > batch_size:
            groups.append(range(start, number))
            start, filled = number, 0
        filled += count
    return [*groups, range(start, len(rows))]


def _least(values: list[float]) -> int:
    return min(range(len(values)), key=values.__getitem__)
