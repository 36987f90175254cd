"""A folder in Hugging Face's form as a starting point: what can be known of it before anything is queued."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.config.pretrain import ModelConfig
from pipeline.errors import UserError
from pipeline.files import sha256_file

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
ARCHITECTURES = {"LlamaForCausalLM": False, "Qwen3ForCausalLM": True}  # and whether they normalize queries and keys
SAME_NAMES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps",
    "tie_word_embeddings",
)  # fmt: skip
ABSENT = {"tie_word_embeddings": False, "rms_norm_eps": 1e-6}  # what transformers takes where config.json says nothing


def check_folder(folder: Path, model: ModelConfig, vocab_size: int) -> None:
    """Raise UserError, with every difference, unless the folder holds a model of this very shape."""
    there = _read(folder / "config.json")
    weight_files(folder)
    architecture = next(iter(there.get("architectures") or []), "none")
    if architecture not in ARCHITECTURES:
        raise UserError(
            f"{folder} is a {architecture}; only {' and '.join(ARCHITECTURES)} have the layers of this model"
        )
    if differences := list(_differences(there, model, vocab_size, ARCHITECTURES[architecture])):
        listed = "\n".join(f"  {difference}" for difference in differences)
        raise UserError(f"{folder} holds another model than this config. Set these keys to what it has:\n{listed}")


def _differences(there: dict[str, Any], model: ModelConfig, vocab_size: int, qk_norm: bool) -> Iterator[str]:
    heads = there.get("num_attention_heads")
    rope = there.get("rope_parameters") or there.get("rope_scaling") or {}
    pairs = [(f"model.{key}", getattr(model, key), there.get(key, ABSENT.get(key))) for key in SAME_NAMES]
    pairs += [
        ("model.num_key_value_heads", model.kv_heads, there.get("num_key_value_heads") or heads),
        ("model.rope_theta", model.rope_theta, there.get("rope_theta", rope.get("rope_theta", 10_000.0))),
        ("model.qk_norm", model.qk_norm, qk_norm),
        ("tokenize.vocab_size", vocab_size, there.get("vocab_size")),
    ]
    yield from (f"{key}: {ours} -> {theirs}" for key, ours, theirs in pairs if ours != theirs)
    size = model.hidden_size // model.num_attention_heads
    if (there.get("head_dim") or size) != size:
        yield f"its heads have {there['head_dim']} dimensions, those of this config {size} = hidden_size / heads"
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        yield f"its rotary embedding is scaled ({rope.get('rope_type', rope.get('type'))}), which this model's is not"
    if there.get("attention_bias") or there.get("mlp_bias"):
        yield "its layers have biases, which this model's have not"


def weight_files(folder: Path) -> list[Path]:
    """List the files of weights; UserError where one is missing."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / WEIGHTS_INDEX).is_file():
        raise UserError(f"{folder} holds neither {WEIGHTS} nor {WEIGHTS_INDEX}")
    names = sorted(set(_read(folder / WEIGHTS_INDEX).get("weight_map", {}).values()))
    paths = [folder / Path(str(name)).name for name in names]
    if missing := [path.name for path in paths if not path.is_file()]:
        raise UserError(f"{folder} lacks {', '.join(missing[:5])}, which {WEIGHTS_INDEX} names")
    return paths


def describe_folder(folder: Path) -> dict[str, Any]:
    """Return what run.json keeps of the folder: its path and the hashes of its weights."""
    return {"path": str(folder), "sha256": {path.name: sha256_file(path) for path in weight_files(folder)}}


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing; name a folder in Hugging Face's form") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} is not a JSON object")
    return value
