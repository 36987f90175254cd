"""A checkpoint made ready to generate: weights in an engine, and the tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from pipeline.config.schema import Config
from pipeline.lm.checkpoint import load_weights
from pipeline.lm.engine import Engine, TorchEngine
from pipeline.lm.hardware import Hardware, has_fast_bf16
from pipeline.lm.model import Transformer, num_parameters
from pipeline.lm.native import NativeEngine, build
from pipeline.lm.origin import check_tokenizer
from pipeline.lm.tokenizer import Tokenizer

WORTH_COMPILING = 4_000_000  # parameters; for a smaller model the seconds that the compiler takes come never back
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Served:
    """What generation needs of a checkpoint; `about` says which engine it is."""

    engine: Engine
    tokenizer: Tokenizer
    context: int
    dtype: str
    about: str
    checkpoint: str  # the manifest's hash, which covers all files


def open_model(checkpoint: Path, tokenizer: Path, config: Config, hardware: Hardware, cache: Path) -> Served:
    """Load a checkpoint into an engine.

    On a CPU with a C compiler native.c computes a model of some size, compiled once into `cache`; else torch does.
    """
    wanted, device = config.inference.precision, hardware.device
    precision = ("bf16" if device != "cpu" and has_fast_bf16(device) else "fp32") if wanted == "auto" else wanted
    context, slots = config.pretrain.sequence_length, config.inference.batch_size
    words = Tokenizer(tokenizer)
    model = Transformer(config.model, config.tokenize.vocab_size, context)
    manifest = load_weights(checkpoint, model)
    check_tokenizer(checkpoint, manifest, words.fingerprint)
    # Decided by the model alone: by the amount of work, the same prompt could get another engine's last digits.
    large = num_parameters(model) >= WORTH_COMPILING
    library = build(cache) if device == "cpu" and large else None
    engine: Engine
    if library is not None:
        engine = NativeEngine(library, model, slots, DTYPES[precision], hardware.threads)
        about = f"native.c, {precision}, {hardware.threads} threads"
    else:
        engine = TorchEngine(model, slots, device, DTYPES[precision])
        why = ", since no C compiler is here" if device == "cpu" and large else ""
        about = f"torch on {device}, {precision}{why}"
    return Served(engine, words, context, precision, about, str(manifest["sha256"]))
