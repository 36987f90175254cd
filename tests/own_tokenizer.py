"""A tokenizer that was trained on the project's own code."""

from __future__ import annotations

from pathlib import Path

from conftest import PROJECT

from pipeline.config.tokenize import TokenizeConfig
from pipeline.lm.tokenizer import Tokenizer, train_tokenizer


def own_tokenizer(path: Path, vocab_size: int) -> Tokenizer:
    """Train it, write it to `path` and open it."""
    texts = [file.read_bytes() for file in sorted((PROJECT / "pipeline" / "lm").glob("*.py"))]
    train_tokenizer(texts, TokenizeConfig(vocab_size=vocab_size), path)
    return Tokenizer(path)
