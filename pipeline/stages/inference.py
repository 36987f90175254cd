"""Let the newest checkpoint of a Run complete its prompts, into samples/."""

from __future__ import annotations

from pipeline.stages import early  # noqa: F401 - first: signals are taken while torch is imported

# isort: split
import json
import sys
import time
from collections.abc import Callable
from typing import Any

from pipeline.config import Config
from pipeline.errors import NotReadyError
from pipeline.files import read_json, write_text
from pipeline.lm.checkpoint import load_weights
from pipeline.lm.generation import complete
from pipeline.lm.hardware import choose_hardware, start_ranks
from pipeline.lm.model import Transformer
from pipeline.lm.origin import check_tokenizer
from pipeline.lm.tokenizer import Tokenizer
from pipeline.run import Run
from pipeline.stages.main import Attempt, poll, run_stage


def inference(run: Run, config: Config, attempt: Attempt) -> int:
    """Write samples/step-N.jsonl, one line per prompt; return the step."""
    steps = run.checkpoint_steps()
    if not steps:
        raise NotReadyError(f"{run.checkpoints}: no checkpoint to sample from yet; pretrain writes the first one")
    hardware = choose_hardware(config, (read_json(run.record) or {}).get("hardware"))
    start_ranks(hardware)
    tokenizer = Tokenizer(run.tokenizer)
    model = Transformer(config.model, config.tokenize.vocab_size, config.pretrain.sequence_length)
    check_tokenizer(run.checkpoint(steps[-1]), load_weights(run.checkpoint(steps[-1]), model), tokenizer.fingerprint)
    model.to(hardware.device).eval()
    lines = [
        json.dumps(_sample(model, tokenizer, config, prompt, number, lambda: poll(run, attempt)), ensure_ascii=False)
        for number, prompt in enumerate(config.inference.prompts)
    ]
    write_text(run.samples(steps[-1]), "\n".join(lines) + "\n")
    return steps[-1]


def _sample(
    model: Transformer, tokenizer: Tokenizer, config: Config, prompt: str, number: int, poll: Callable[[], None]
) -> dict[str, Any]:
    """Complete one prompt; each has a seed of its own, so that its text does not depend on the others."""
    started = time.monotonic()
    ids = tokenizer.encode(prompt).tolist()
    result = complete(model, ids, config.inference, tokenizer.eos_id, config.inference.seed + number, poll)
    text = tokenizer.decode(ids + result.ids)[len(tokenizer.decode(ids)) :]
    seconds = time.monotonic() - started
    print(f"{len(result.ids)} tokens in {seconds:.1f} s after {prompt!r}")
    return {
        "prompt": prompt,
        "completion": text,
        "finish_reason": result.finish_reason,
        "tokens": len(result.ids),
        "seconds": round(seconds, 3),
    }


if __name__ == "__main__":
    sys.exit(run_stage("inference", inference))
