"""From logits to tokens and from tokens to text, one prompt at a time: no prompt knows of those beside it."""

from __future__ import annotations

import codecs
import hashlib
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from pipeline.config.inference import InferenceConfig
from pipeline.errors import UserError
from pipeline.lm.tokenizer import Tokenizer

# One U+FFFD for each byte that is no character, as the tokenizer decodes them.
codecs.register_error("each byte", lambda error: ("\ufffd" * (error.end - error.start), error.end))  # type: ignore[attr-defined]


def seeds_of(prompts: Sequence[str], seed: int) -> list[int]:
    """Return a seed for each prompt, from its text: neither order nor number changes it; equal prompts get others."""
    seen: Counter[str] = Counter()
    seeds = []
    for prompt in prompts:
        text = f"{seed} {seen[prompt]} {prompt}".encode()
        seeds.append(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1)
        seen[prompt] += 1
    return seeds


def choose(logits: Tensor, config: InferenceConfig, generators: Sequence[torch.Generator]) -> list[int]:
    """Draw one id from each row of logits (N, V): greedy at temperature 0, else after top-k, top-p and min-p.

    Top-p is nucleus sampling (Holtzman 2019), min-p that of Nguyen 2024. Each row draws one number from its generator.
    """
    if not torch.isfinite(logits).all():
        raise UserError("the model's logits are not finite: this checkpoint is broken; take an older one")
    if config.temperature == 0:
        return logits.argmax(-1).tolist()
    # In fp64: a sum over the vocabulary must not decide by its own rounding. The likeliest is 0, so nothing overflows.
    scores = (logits - logits.amax(-1, keepdim=True)).double() / config.temperature
    if config.top_k is not None and config.top_k < scores.shape[-1]:
        scores = scores.masked_fill(scores < scores.topk(config.top_k).values[:, -1:], float("-inf"))
    likely = scores.softmax(-1)
    if config.top_p is not None:
        ordered, order = likely.sort(descending=True, stable=True)
        beyond = ordered.cumsum(-1) - ordered >= config.top_p  # the likeliest one always stays
        likely = likely.scatter(-1, order, ordered.masked_fill(beyond, 0.0))
    if config.min_p is not None:
        likely = likely.masked_fill(likely < config.min_p * likely.amax(-1, keepdim=True), 0.0)
    sums = likely.cumsum(-1)
    drawn = torch.stack([torch.rand(1, generator=generator, dtype=torch.float64) for generator in generators])
    return torch.searchsorted(sums, drawn * sums[:, -1:], right=True)[:, 0].clamp(max=logits.shape[-1] - 1).tolist()


class TextStream:
    """The text of tokens as they come: only whole characters, and nothing that may turn out to be a stop text."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._decoder = codecs.getincrementaldecoder("utf-8")("each byte")
        self._given = 0
        self.text = ""  # without the stop text
        self.stopped = False

    def push(self, token: int) -> str:
        """Take a token; return the text that is certain since the last call."""
        return self._add(self._decoder.decode(self._tokenizer.bytes_of(token)), last=False)

    def finish(self) -> str:
        """Return what was held back: the beginning of a character or of a stop text that did not go on."""
        return self._add(self._decoder.decode(b"", final=True), last=True)

    def _add(self, new: str, *, last: bool) -> str:
        if self.stopped:
            return ""
        before, self.text = len(self.text), self.text + new
        found = [self.text.find(stop, max(0, before - len(stop) + 1)) for stop in self._stops]
        if hits := [at for at in found if at >= 0]:
            self.text, self.stopped, last = self.text[: min(hits)], True, True
        end = len(self.text) - (0 if last else self._held())
        certain, self._given = self.text[self._given : end], max(self._given, end)
        return certain

    def _held(self) -> int:
        """Return how many characters at the end may be the beginning of a stop text."""
        longest = 0
        for stop in self._stops:
            fits = (n for n in range(min(len(stop) - 1, len(self.text)), 0, -1) if self.text.endswith(stop[:n]))
            longest = max(longest, next(fits, 0))
        return longest
