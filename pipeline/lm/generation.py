"""Complete a prompt, token by token, with a cache of keys and values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.config_inference import InferenceConfig
from pipeline.errors import UserError
from pipeline.lm.model import Transformer


@dataclass(frozen=True)
class Completion:
    """The new ids, without the end token, and why it ended: "stop" (the end token) or "length"."""

    ids: list[int]
    finish_reason: str


def choose(logits: Tensor, config: InferenceConfig, generator: torch.Generator) -> int:
    """Draw one id from logits (V,): greedy at temperature 0, else after top-k, then top-p (nucleus, Holtzman 2019)."""
    if config.temperature == 0:
        return int(logits.argmax())
    logits = logits.float().cpu() / config.temperature  # on the CPU, so that a seed gives the same text everywhere
    if config.top_k is not None and config.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(config.top_k).values[-1], float("-inf"))
    probabilities = logits.softmax(-1)
    if config.top_p is not None:
        ordered, order = probabilities.sort(descending=True)
        beyond = ordered.cumsum(-1) - ordered >= config.top_p  # the most likely one always stays
        probabilities = probabilities.index_fill(0, order[beyond], 0.0)
    return int(torch.multinomial(probabilities, 1, generator=generator))


@torch.inference_mode()
def complete(
    model: Transformer,
    prompt: list[int],
    config: InferenceConfig,
    eos: int,
    seed: int,
    poll: Callable[[], None] = lambda: None,
) -> Completion:
    """Continue `prompt` until the end token, max_new_tokens, or the context is full. `poll` may raise.

    An empty prompt begins at the end token, which in training stands before every document.
    """
    prompt = prompt or [eos]
    if len(prompt) > model.max_sequence_length:
        raise UserError(
            f"inference.prompts: a prompt has {len(prompt)} tokens, "
            f"but the model's context holds {model.max_sequence_length}; shorten it"
        )
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    cache = model.new_cache(1)
    ids = torch.tensor([prompt], device=device)
    new: list[int] = []
    for _ in range(min(config.max_new_tokens, model.max_sequence_length - len(prompt))):
        poll()
        chosen = choose(model(ids, cache=cache)[0, -1], config, generator)
        if chosen == eos:
            return Completion(new, "stop")
        new.append(chosen)
        ids = torch.tensor([[chosen]], device=device)
    return Completion(new, "length")
