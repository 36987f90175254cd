"""What a person probably meant by a key that does not exist."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel

from pipeline.slurm.options import SBATCH

KeyPath = tuple[str | int, ...]

# What other trainers call it. The key may stand in any section.
ELSEWHERE = {
    "lr": "pretrain.learning_rate",
    "muon_lr": "pretrain.muon_learning_rate",
    "min_lr_ratio": "pretrain.min_learning_rate_ratio",
    "batch_size": "pretrain.global_batch_size",
    "train_batch_size": "pretrain.global_batch_size",
    "device_batch_size": "pretrain.micro_batch_size",
    "per_device_train_batch_size": "pretrain.micro_batch_size",
    "seq_len": "pretrain.sequence_length",
    "block_size": "pretrain.sequence_length",
    "max_seq_len": "pretrain.sequence_length",
    "context_length": "pretrain.sequence_length",
    "max_iters": "pretrain.max_steps",
    "train_steps": "pretrain.max_steps",
    "steps": "pretrain.max_steps",
    "warmup": "pretrain.warmup_steps",
    "lr_scheduler_type": "pretrain.schedule",
    "clip_grad": "pretrain.grad_clip",
    "max_grad_norm": "pretrain.grad_clip",
    "dtype": "pretrain.precision",
    "gradient_checkpointing": "pretrain.activation_checkpointing",
    "sharding": "pretrain.parallel",
    "report_to": "pretrain.sinks",
    "save_steps": "pretrain.save_interval",
    "logging_steps": "pretrain.log_interval",
    "train": "pretrain",
    "training": "pretrain",
    "tokenizer": "tokenize.tokenizer",
    "n_layer": "model.num_hidden_layers",
    "n_layers": "model.num_hidden_layers",
    "n_head": "model.num_attention_heads",
    "n_heads": "model.num_attention_heads",
    "n_kv_heads": "model.num_key_value_heads",
    "n_embd": "model.hidden_size",
    "d_model": "model.hidden_size",
    "dim": "model.hidden_size",
    "eval": "evaluate",
    "evaluation": "evaluate",
    "generate": "inference",
    "sample": "inference",
    "dataset": "data",
    "datasets": "data",
}


def section_in(annotation: Any) -> type[BaseModel] | None:
    """Return the section class inside a type such as `list[DataSource]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for inner in get_args(annotation) if (found := section_in(inner)) is not None), None)


def section_at(model: type[BaseModel], path: KeyPath) -> type[BaseModel] | None:
    """Return the section class that lies at `path` under `model`."""
    section: type[BaseModel] | None = model
    for part in path:
        if isinstance(part, int):
            continue
        field = section.model_fields.get(part) if section else None
        section = section_in(field.annotation) if field else None
    return section


@cache  # asked once for each unknown key, of which a file can hold thousands
def _all_keys(model: type[BaseModel], section: str = "") -> list[tuple[str, str]]:
    """List (dotted section or '', key) of the top level and of each section."""
    keys = []
    for name, field in model.model_fields.items():
        keys.append((section, name))
        inner = section_in(field.annotation)
        if inner is not None:
            keys += _all_keys(inner, _join(section, name))
    return keys


def unknown_key(model: type[BaseModel], path: KeyPath) -> tuple[str, str | None]:
    """Say what to do about the unknown key at `path`, and return the dotted key that was probably meant."""
    here = ".".join(part for part in path[:-1] if isinstance(part, str))
    hint, meant = _hint(model, str(path[-1]), here)
    return f"unknown key; {hint}", meant


def _hint(model: type[BaseModel], name: str, here: str) -> tuple[str, str | None]:
    tidy = name[:100].lower().replace("-", "_")
    keys = _all_keys(model)
    sections = [section for section, key in keys if key == tidy and section != here]
    own = [key for section, key in keys if section == here]
    if tidy in own:
        return f"did you mean {tidy}?", _join(here, tidy)
    if "" in sections:
        return "it belongs at the top of the file, not further in", tidy
    if sections:
        return f"it belongs under {_either(sections)}", _join(sections[0], tidy) if len(sections) == 1 else None
    section, dot, key = tidy.rpartition(".")
    if dot and (section, key) in keys:
        return f"write {key} below {section}:, further in", tidy
    if ":" in name:
        return "put a blank after the colon: `key: value`", None
    return _near(model, tidy, here, own, keys)


def _near(
    model: type[BaseModel], tidy: str, here: str, own: list[str], keys: list[tuple[str, str]]
) -> tuple[str, str | None]:
    other_names: Mapping[str, str] = getattr(model, "other_names", {})
    if tidy in other_names:
        meant = other_names[tidy]
        return f"did you mean {_from_here(meant, here)}?", meant
    option = tidy.replace("_", "-")
    if option in SBATCH and (maps := [section for section, key in keys if key == "sbatch"]):
        place = "sbatch:" if here in maps else f"sbatch: of {_either([section or 'the file' for section in maps])}"
        return f"an option of Slurm goes below {place}; write there {option}: VALUE", None
    if near := get_close_matches(tidy, own, n=1):
        return f"did you mean {near[0]}?", _join(here, near[0])
    everywhere = {key: _join(section, key) for section, key in reversed(keys)}
    if near := get_close_matches(tidy, everywhere, n=1, cutoff=0.75):
        meant = everywhere[near[0]]
        return f"did you mean {meant}?", meant
    place = f"under {here}" if here else "at the top"
    return f"remove it; the keys {place} are {', '.join(own)}", None


def _either(sections: list[str]) -> str:
    return " or ".join(sections)


def _join(section: str, key: str) -> str:
    return f"{section}.{key}" if section else key


def _from_here(meant: str, here: str) -> str:
    return meant.removeprefix(f"{here}.") if here else meant
