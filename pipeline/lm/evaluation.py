"""Bits per byte: comparable across tokenizers, because bytes are what the text has without any."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.lm.batches import ValidationText
from pipeline.lm.hardware import Hardware
from pipeline.lm.loss import IGNORE_INDEX
from pipeline.lm.model import Transformer

Values = dict[str, list[float]]
Poll = Callable[[], None]


class Task(Protocol):
    """A Benchmark made ready: what is in a batch depends on Config and data alone, never on who scores it."""

    batches: int
    settings: dict[str, Any]  # all that changes its numbers beside checkpoint and tokenizer
    about: dict[str, Any]  # what the Score says beside its numbers; content_sha256 names what it was measured on

    def score(self, model: Transformer, hardware: Hardware, batches: range, poll: Poll) -> Values:
        """Return the numbers of these batches, in their order. `poll` is asked between batches and may raise."""
        ...


def windows(length: int, size: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, first scored, end) so that each of `length` targets is scored once.

    Every window but the first scores its last `stride` targets and uses the up to `size - stride` before as context.
    """
    scored = 0
    while scored < length:
        end = min(length, size if scored == 0 else scored + stride)
        yield max(0, end - size), scored, end
        scored = end


class TextTask:
    """The likelihood of a text, its documents one after another, each token with `size - stride` before it.

    The text's first token is predicted from `bos`. Its bytes are without the end-of-document tokens; their likelihood
    counts, since a model that cannot tell where documents end is worse.
    """

    def __init__(self, text: ValidationText, *, bos: int, size: int, stride: int, batch_size: int) -> None:
        self.ids, self.size, self.batch_size = (ids := text.ids), size, batch_size
        self.inputs = np.concatenate(([bos], ids[:-1]))
        self.spans = list(windows(len(ids), size, stride))
        self.batches = -(-len(self.spans) // batch_size)
        self.settings = {"size": size, "stride": stride, "batch_size": batch_size, "tokens": len(ids)}
        self.about: dict[str, Any] = {"bytes": text.bytes, "content_sha256": text.sha256}

    @torch.inference_mode()
    def score(self, model: Transformer, hardware: Hardware, batches: range, poll: Poll) -> Values:
        """Return the negative log-likelihood in nats ("nll") and the number of targets ("tokens") of each batch."""
        values: Values = {"nll": [], "tokens": []}
        for batch in batches:
            spans = self.spans[batch * self.batch_size : (batch + 1) * self.batch_size]
            x = np.zeros((len(spans), self.size), dtype=np.int64)
            y = np.full_like(x, IGNORE_INDEX)
            for row, (start, scored, end) in enumerate(spans):
                x[row, : end - start] = self.inputs[start:end]  # padding lies behind: causal attention never looks
                y[row, scored - start : end - start] = self.ids[scored:end]
            with hardware.autocast():
                nll = model(to(x, hardware), to(y, hardware), reduction="none")
            values["nll"].append(nll.double().sum().item())
            values["tokens"].append(sum(end - scored for _, scored, end in spans))
            poll()
        return values


def to(array: NDArray[np.int64], hardware: Hardware) -> torch.Tensor:
    """Return an array as a tensor where the model is."""
    return torch.from_numpy(array).to(hardware.device)
