"""Bits per byte: comparable across tokenizers, because bytes are what the text has without any."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.lm.hardware import Hardware
from pipeline.lm.model import IGNORE_INDEX, Transformer


@dataclass(frozen=True)
class Likelihood:
    """The negative log-likelihood of a text, in nats, with what it may be divided by."""

    nll: float
    tokens: int
    bytes: int

    @property
    def bits_per_byte(self) -> float:
        return self.nll / math.log(2) / self.bytes

    @property
    def perplexity_per_token(self) -> float:
        return math.exp(self.nll / self.tokens)


def windows(length: int, size: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, first scored, end) so that each of `length` targets is scored once.

    Every window but the first scores its last `stride` targets and uses the up to `size - stride` before as context.
    """
    scored = 0
    while scored < length:
        end = min(length, size if scored == 0 else scored + stride)
        yield max(0, end - size), scored, end
        scored = end


@torch.inference_mode()
def likelihood(
    model: Transformer,
    hardware: Hardware,
    ids: NDArray[np.int64],
    text_bytes: int,
    *,
    bos: int,
    stride: int,
    batch_size: int,
    progress: Callable[[float], None] = lambda share: None,
) -> Likelihood:
    """Score ids (N,), the documents of a text one after another, each token with at least size - stride before it.

    The text's first token is predicted from `bos`. `text_bytes` is the text's length in UTF-8 bytes, without the
    end-of-document tokens; their likelihood counts, since a model that cannot tell where documents end is worse.
    """
    size = model.max_sequence_length
    inputs = np.concatenate(([bos], ids[:-1]))
    spans = list(windows(len(ids), size, stride))
    total = 0.0
    for first in range(0, len(spans), batch_size):
        x = np.zeros((min(batch_size, len(spans) - first), size), dtype=np.int64)
        y = np.full_like(x, IGNORE_INDEX)
        for row, (start, scored, end) in enumerate(spans[first : first + batch_size]):
            x[row, : end - start] = inputs[start:end]  # the padding lies behind, where causal attention never looks
            y[row, scored - start : end - start] = ids[scored:end]
        with hardware.autocast():
            nll = model(_to(x, hardware), _to(y, hardware), reduction="none")
        total += nll.double().sum().item()
        progress(min(1.0, (first + batch_size) / len(spans)))
    return Likelihood(total, len(ids), text_bytes)


def _to(array: NDArray[np.int64], hardware: Hardware) -> torch.Tensor:
    return torch.from_numpy(array).to(hardware.device)
