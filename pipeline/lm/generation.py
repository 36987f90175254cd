"""Complete prompts: as many at a time as there are slots, each with a place taken anew as soon as a text ends."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pipeline.config.inference import InferenceConfig
from pipeline.errors import UserError
from pipeline.lm.engine import Engine, Part
from pipeline.lm.sampling import TextStream, choose, seeds_of
from pipeline.lm.tokenizer import Tokenizer


@dataclass(frozen=True)
class Request:
    """One prompt, its tokens and its seed; `number` is its place among all."""

    number: int
    prompt: str
    ids: list[int]
    seed: int


@dataclass(frozen=True)
class Completion:
    """The text that follows a prompt; it ended at the end token or a stop text ("stop"), or for its "length"."""

    number: int
    prompt: str
    text: str
    finish_reason: str
    tokens: int
    seconds: float  # from the moment that the prompt was begun with

    def to_json(self) -> dict[str, Any]:
        """Return a line of samples."""
        return {
            "prompt": self.prompt,
            "completion": self.text,
            "finish_reason": self.finish_reason,
            "tokens": self.tokens,
            "seconds": round(self.seconds, 3),
        }


@dataclass
class Speed:
    """What was measured: seconds to first tokens and between tokens, and all tokens in all seconds."""

    tokens: int = 0
    seconds: float = 0.0
    first_token: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)


def make_requests(
    prompts: Sequence[str], tokenizer: Tokenizer, config: InferenceConfig, context: int, where: str
) -> list[Request]:
    """Encode prompts; those beyond the context are refused, all of them at once, or cut, as the config says."""
    requests, problems = [], []
    for number, (prompt, seed) in enumerate(zip(prompts, seeds_of(prompts, config.seed), strict=True)):
        ids = tokenizer.encode(prompt).tolist()
        if len(ids) > context and config.long_prompts == "cut":
            ids = ids[-max(1, context - config.max_new_tokens) :]
        elif len(ids) > context:
            problems.append(f"prompt {number + 1} has {len(ids):,} tokens")
        # An empty text begins as every document of the training does.
        requests.append(Request(number, prompt, ids or [tokenizer.eos_id], seed))
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise UserError(
            f"{where}: {', '.join(problems[:5])}{more}, but the model's context holds {context:,}; shorten, "
            "or keep only the end of each with: inference.long_prompts=cut"
        )
    return requests


class _Text:
    """A text that is being written, in a slot."""

    def __init__(self, request: Request, stream: TextStream) -> None:
        self.request, self.stream = request, stream
        self.generator = torch.Generator().manual_seed(request.seed)
        self.begun = self.last = time.monotonic()
        self.new: list[int] = []

    def part(self, slot: int) -> Part:
        if not self.new:
            return Part(slot, 0, self.request.ids)
        return Part(slot, len(self.request.ids) + len(self.new) - 1, self.new[-1:])

    def end(self, reason: str) -> Completion:
        seconds, request = time.monotonic() - self.begun, self.request
        return Completion(request.number, request.prompt, self.stream.text, reason, len(self.new), seconds)


class Generator:
    """Complete requests by an engine. `tell(number, text)` gets new text as it is certain; `poll` may raise."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        config: InferenceConfig,
        context: int,
        tell: Callable[[int, str], None] = lambda number, text: None,
        poll: Callable[[], None] = lambda: None,
    ) -> None:
        self.engine, self.tokenizer, self.config, self.context = engine, tokenizer, config, context
        self.tell, self.poll, self.speed = tell, poll, Speed()

    def run(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """Yield completions in the order in which they end."""
        waiting, texts = deque(requests), dict[int, _Text]()
        places = list(range(min(self.config.batch_size, self.engine.slots)))
        while waiting or texts:
            self.poll()
            began = time.monotonic()
            for slot in places:
                if slot not in texts and waiting:
                    texts[slot] = _Text(request := waiting.popleft(), TextStream(self.tokenizer, self.config.stop))
                    if self._room(request) == 0:
                        yield texts.pop(slot).end("length")
            if not texts:
                continue
            logits = self.engine.forward([text.part(slot) for slot, text in texts.items()])
            chosen = choose(logits, self.config, [text.generator for text in texts.values()])
            ended = [
                (slot, reason)
                for (slot, text), token in zip(texts.items(), chosen, strict=True)
                if (reason := self._take(text, token)) is not None
            ]
            self.speed.seconds += time.monotonic() - began
            for slot, reason in ended:
                yield texts.pop(slot).end(reason)

    def _room(self, request: Request) -> int:
        return min(self.config.max_new_tokens, self.context - len(request.ids))

    def _take(self, text: _Text, token: int) -> str | None:
        """Add a token to a text; return why it ends, if it does."""
        now = time.monotonic()
        if not text.new:
            self.speed.first_token.append(now - text.begun)
        else:
            self.speed.between.append(now - text.last)
        text.last = now
        if token == self.tokenizer.eos_id:
            self.tell(text.request.number, text.stream.finish())
            return "stop"
        text.new.append(token)
        self.speed.tokens += 1
        self.tell(text.request.number, text.stream.push(token))
        if text.stream.stopped:
            return "stop"
        if len(text.new) < self._room(text.request):
            return None
        self.tell(text.request.number, text.stream.finish())
        return "stop" if text.stream.stopped else "length"
