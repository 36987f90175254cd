"""Score checkpoints of a Run on its validation text, beside what compressors reach on the same bytes."""

from __future__ import annotations

from pipeline.stages import early  # noqa: F401 - first: signals are taken while torch is imported

# isort: split
import sys
import time
from typing import Any

from pipeline.complete import steps_to_evaluate
from pipeline.compressors import bits_per_byte
from pipeline.config import Config
from pipeline.errors import NotReadyError
from pipeline.files import read_json, write_json
from pipeline.lm.batches import ValidationText, validation_text
from pipeline.lm.checkpoint import load_weights
from pipeline.lm.evaluation import likelihood
from pipeline.lm.hardware import Hardware, choose_hardware, start_ranks
from pipeline.lm.model import Transformer
from pipeline.lm.origin import check_tokenizer
from pipeline.lm.shards import TokenShards
from pipeline.lm.tokenizer import Tokenizer
from pipeline.lm.verified import verify_shards
from pipeline.run import Run
from pipeline.stages.main import Attempt, poll, run_stage

BENCHMARK = "bits_per_byte"


def evaluate(run: Run, config: Config, attempt: Attempt) -> int:
    """Write what is missing of scores/; return the last step scored."""
    steps = steps_to_evaluate(run, config)
    if not steps:
        raise NotReadyError(f"{run.checkpoints}: no checkpoint to evaluate yet; pretrain writes the first one")
    hardware = choose_hardware(config, (read_json(run.record) or {}).get("hardware"))
    start_ranks(hardware)
    tokenizer = Tokenizer(run.tokenizer)
    shards = TokenShards(run.data, "validation")
    verify_shards(shards)
    text = validation_text(shards, tokenizer)
    if not run.compressors.is_file():
        write_json(run.compressors, {"bytes": len(text.text), "bits_per_byte": bits_per_byte(text.text)})
    for step in steps:
        path = run.scores(step) / f"{BENCHMARK}.json"
        if path.is_file():
            print(f"step {step}: scored already")
            continue
        score = _score(run, config, hardware, tokenizer, text, step, attempt)
        write_json(path, score)
        print(f"step {step}: {score['score']:.4f} bits per byte in {score['seconds']:.1f} s")
    return steps[-1]


def _score(
    run: Run,
    config: Config,
    hardware: Hardware,
    tokenizer: Tokenizer,
    text: ValidationText,
    step: int,
    attempt: Attempt,
) -> dict[str, Any]:
    """Return the record of one checkpoint's bits per byte."""
    started = time.monotonic()
    model = Transformer(config.model, config.tokenize.vocab_size, config.pretrain.sequence_length)
    check_tokenizer(run.checkpoint(step), load_weights(run.checkpoint(step), model), tokenizer.fingerprint)
    model.to(hardware.device).eval()
    result = likelihood(
        model, hardware, text.ids, text.bytes, bos=tokenizer.eos_id, batch_size=config.evaluate.batch_size,
        stride=config.evaluate.stride or config.pretrain.sequence_length // 2,
        progress=lambda share: poll(run, attempt),
    )  # fmt: skip
    return {
        "benchmark": BENCHMARK,
        "score": result.bits_per_byte,
        "unit": "bits/byte",
        "step": step,
        "nll": result.nll,
        "tokens": result.tokens,
        "bytes": result.bytes,
        "perplexity_per_token": result.perplexity_per_token,
        "checkpoint": run.checkpoint(step).name,
        "tokenizer": tokenizer.fingerprint,
        "seconds": time.monotonic() - started,
    }


if __name__ == "__main__":
    sys.exit(run_stage("evaluate", evaluate))
