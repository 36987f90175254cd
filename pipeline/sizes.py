"""The arithmetic of a model: parameters, FLOPs and bytes, from the Config alone."""

from __future__ import annotations

from pipeline.config import Config
from pipeline.config_pretrain import ModelConfig


def layer_parameters(model: ModelConfig) -> int:
    """Count the weights of all layers that multiply: attention and SwiGLU matrices, not the norms."""
    head = model.hidden_size // model.num_attention_heads
    attention = 2 * model.hidden_size * head * (model.num_attention_heads + model.kv_heads)
    return model.num_hidden_layers * (attention + 3 * model.hidden_size * model.intermediate_size)


def num_parameters(model: ModelConfig, vocab_size: int) -> int:
    """Count all parameters: layers, norms, embedding, and the head where it is not tied."""
    norms = model.hidden_size * (2 * model.num_hidden_layers + 1)
    if model.qk_norm:
        norms += 2 * model.num_hidden_layers * (model.hidden_size // model.num_attention_heads)
    tables = 1 if model.tie_word_embeddings else 2
    return layer_parameters(model) + norms + tables * vocab_size * model.hidden_size


def flops_per_token(model: ModelConfig, vocab_size: int, sequence_length: int) -> float:
    """Return the FLOPs of forward and backward per token: 6 N + 12 L D T (PaLM, Chowdhery et al. 2022, appendix B).

    N are the weights that multiply: those of the layers and of the head, tied or not; not the embedding look-up, not
    the norms. The attention term counts the full T x T square, as PaLM does, although half of it is masked.
    """
    weights = layer_parameters(model) + vocab_size * model.hidden_size
    return 6.0 * weights + 12.0 * model.num_hidden_layers * model.hidden_size * sequence_length


def tokens_per_step(config: Config) -> int:
    """Return the tokens that one optimizer step learns from, over all ranks."""
    return config.pretrain.global_batch_size * config.pretrain.sequence_length


def checkpoint_bytes(config: Config) -> int:
    """Estimate one checkpoint: fp32 weights, and one (Muon) or two (AdamW) fp32 moments for each."""
    total = num_parameters(config.model, config.tokenize.vocab_size)
    single = layer_parameters(config.model) if config.pretrain.optimizer == "muon" else 0
    return 4 * (total + 2 * total - single)
