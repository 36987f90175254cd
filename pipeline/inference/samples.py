"""What samples depend on, what was measured while they were made, and whether that reaches the config's targets."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.config.digest import digest_values
from pipeline.config.inference import InferenceConfig
from pipeline.config.stage import StageSection
from pipeline.inference.prompts import read_prompts

# What changes no text: limits and options of Jobs, how many prompts at a time, what is hoped for.
APART = {
    *StageSection.model_fields,
    "batch_size",
    "target_tokens_per_s",
    "target_first_token_p50",
    "target_first_token_p95",
}
DIGESTED = {
    "prompts", "prompts_file", "long_prompts", "precision", "max_new_tokens", "temperature", "top_k", "top_p", "min_p",
    "stop", "seed",
}  # fmt: skip


def prompts_of(config: InferenceConfig) -> list[str]:
    """Return the prompts: those of the file, if there is one, else the config's own."""
    return read_prompts(Path(config.prompts_file)) if config.prompts_file else list(config.prompts)


def settings_digest(config: InferenceConfig) -> str:
    """Hash all of the config that the samples depend on, and the file of prompts as it is now."""
    settings = digest_values(config, DIGESTED, APART)
    if config.prompts_file:
        path = Path(config.prompts_file)
        settings["prompts_file"] = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "gone"
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def share_of(values: Sequence[float], share: float) -> float | None:
    """Return the value that `share` of all values do not exceed; None where there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def measured(tokens: int, seconds: float, first_token: Sequence[float], between: Sequence[float]) -> dict[str, Any]:
    """Return the figures of one attempt: tokens/s of all prompts together, and seconds, of half and of 95 %."""
    figures = {
        "tokens_per_s": tokens / seconds if seconds > 0 else None,
        "first_token_p50": share_of(first_token, 0.5),
        "first_token_p95": share_of(first_token, 0.95),
        "token_p50": share_of(between, 0.5),
        "token_p95": share_of(between, 0.95),
    }
    return {name: value if value is None else round(value, 5) for name, value in figures.items()}


def compare(figures: dict[str, Any], config: InferenceConfig) -> list[dict[str, Any]]:
    """Return each target of the config with what was measured, and whether it was reached (None: not measured)."""
    results = []
    for name in ("tokens_per_s", "first_token_p50", "first_token_p95"):
        target, value = getattr(config, f"target_{name}"), figures.get(name)
        if target is not None:
            reached = None if value is None else value >= target if name == "tokens_per_s" else value <= target
            results.append({"target": name, "wanted": target, "measured": value, "reached": reached})
    return results
