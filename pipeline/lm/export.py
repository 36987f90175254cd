"""A model as the folder that transformers, vLLM and others load with no code of ours.

The state dict has Hugging Face's names already, so weights are copied as they are.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from pipeline.config.pretrain import ModelConfig
from pipeline.errors import UserError
from pipeline.inference.hugging_face import WEIGHTS, WEIGHTS_INDEX
from pipeline.lm.model import Transformer, head_size
from pipeline.lm.tokenizer import Tokenizer
from pipeline.lm.tokenizer_json import dump_tokenizer

SHARD_BYTES = 5 * 10**9  # what others cut large models into
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def hugging_face_config(config: ModelConfig, vocab_size: int, context: int, eos: int, dtype: str) -> dict[str, Any]:
    """Return config.json of a model that reads up to `context` tokens."""
    values: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM" if config.qk_norm else "LlamaForCausalLM"],
        "model_type": "qwen3" if config.qk_norm else "llama",
        "vocab_size": vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": head_size(config),
        "max_position_embeddings": context,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": eos,  # in training the end token stands before every document
        "eos_token_id": eos,
        "pad_token_id": eos,
        "use_cache": True,
        "torch_dtype": dtype,
    }
    return values | ({"use_sliding_window": False} if config.qk_norm else {"mlp_bias": False})


def export_model(model: Transformer, tokenizer: Tokenizer, folder: Path, precision: str) -> list[str]:
    """Write model and tokenizer into `folder`, which is there and empty; return what a person should know.

    `precision` is fp32, the weights as they were trained, or bf16, which is half the size.
    """
    dtype = DTYPES[precision]
    values = hugging_face_config(
        model.config, model.vocab_size, model.max_sequence_length, tokenizer.eos_id, str(dtype).removeprefix("torch.")
    )
    _write_json(folder / "config.json", values)
    ids = {key: values[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", ids)
    _write_weights({name: tensor.detach().to(dtype) for name, tensor in model.state_dict().items()}, folder)
    shutil.copyfile(tokenizer.path, folder / "tokenizer.model")
    try:
        kind = dump_tokenizer(tokenizer.path, folder, model.max_sequence_length)
    except UserError as error:
        return [f"{error}; so there is only tokenizer.model, which others convert in their own way"]
    if kind == "Unigram":  # SentencePiece adds in fp32, others in fp64
        return ["a unigram tokenizer: where two ways to cut a text are equally likely, others may cut it the other way"]
    return []


def _write_weights(tensors: dict[str, Tensor], folder: Path) -> None:
    """Write one file, or several with an index where the model is large."""
    shards = list(_shards(tensors))
    if len(shards) == 1:
        _save(shards[0], folder / WEIGHTS)
        return
    names = [f"model-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        _save(shard, folder / name)
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    places = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    _write_json(folder / WEIGHTS_INDEX, {"metadata": {"total_size": size}, "weight_map": places})


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    save_file(tensors, path, {"format": "pt"})  # transformers reads no file that does not say so
    path.chmod(0o644)  # safetensors leaves it to the owner alone


def _shards(tensors: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        bytes_ = tensor.numel() * tensor.element_size()
        if shard and size + bytes_ > SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name], size = tensor.contiguous(), size + bytes_
    yield shard


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
