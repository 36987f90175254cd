"""The arithmetic of a model: parameters, FLOPs and bytes, from the Config alone."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.pretrain import ModelConfig
from pipeline.config.schema import Config


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


def total_flops(config: Config) -> float:
    """Return the FLOPs of the whole training."""
    per_token = flops_per_token(config.model, config.tokenize.vocab_size, config.pretrain.sequence_length)
    return per_token * tokens_per_step(config) * config.pretrain.max_steps


def training_seconds(flops: float, ranks: int, peak_tflops: float, mfu: float) -> float:
    """Return how long `flops` take at a share `mfu` of the ranks' peak."""
    return flops / (ranks * peak_tflops * 1e12 * mfu)


def checkpoint_bytes(config: Config) -> int:
    """Estimate one checkpoint: fp32 weights, and one (Muon) or two (AdamW) fp32 moments for each."""
    total = num_parameters(config.model, config.tokenize.vocab_size)
    single = layer_parameters(config.model) if config.pretrain.optimizer == "muon" else 0
    return 4 * (total + 2 * total - single)


@dataclass(frozen=True)
class Memory:
    """What one rank holds at the fullest moment of a step, in bytes: the end of a forward pass."""

    weights: float
    gradients: float
    optimizer: float
    copies: float  # weights in bf16 (autocast), or gathered from the other ranks
    activations: float  # of the layers
    logits: float  # with their gradient

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.copies + self.activations + self.logits


def shards(config: Config) -> int:
    """Return over how many ranks weights, gradients and optimizer state are spread."""
    pretrain = config.pretrain
    return {"ddp": 1, "fsdp": pretrain.nodes * pretrain.nproc_per_node, "hsdp": pretrain.nproc_per_node}[
        pretrain.parallel
    ]


def tokens_per_pass(config: Config) -> int:
    """Return the tokens of one rank's forward pass."""
    pretrain = config.pretrain
    rows = pretrain.micro_batch_size or pretrain.global_batch_size // (pretrain.nodes * pretrain.nproc_per_node)
    return rows * pretrain.sequence_length


def memory(config: Config) -> Memory:
    """Estimate one rank's memory, without what CUDA, NCCL and the allocator take. `precision: auto` counts as bf16."""
    model, vocab_size = config.model, config.tokenize.vocab_size
    total, layers, parts = num_parameters(model, vocab_size), layer_parameters(model), shards(config)
    single = layers if config.pretrain.optimizer == "muon" else 0
    width = 4 if config.pretrain.precision == "fp32" else 2  # bytes of a number in products
    rest, one_layer = total - layers, layers / model.num_hidden_layers
    if parts > 1:  # gathered: embedding, head, and the layer at work and the next; their gradients before the sum
        copies = 2 * width * (rest + 2 * one_layer)
    else:
        copies = 2.0 * (layers + vocab_size * model.hidden_size) if width == 2 else 0.0
    return Memory(
        weights=4 * total / parts,
        gradients=4 * total / parts,
        optimizer=4 * (2 * total - single) / parts,
        copies=copies,
        activations=activation_bytes(config) * tokens_per_pass(config),
        logits=_logits_bytes(config, width),
    )


def activation_bytes(config: Config) -> float:
    """Return the bytes that all layers keep for the backward pass, per token.

    A layer keeps, with w bytes a number in products and the residual stream in fp32: for each of two norms its input
    and what it normalized (both fp32) and its output, of which autocast makes a copy for each product, three and two
    (the compiler makes one, so that compiled training needs less than this); queries, keys, values and the attention's
    output; four of the feed-forward layer's width. `selective` keeps the layer's input and what products and attention
    return, `full` the input alone; one layer at a time is then made again.
    """
    model, pretrain = config.model, config.pretrain
    w = 4 if pretrain.precision == "fp32" else 2
    D, F = model.hidden_size, model.intermediate_size
    q = D  # heads x size of a head
    kv = q * model.kv_heads // model.num_attention_heads
    outputs = 2 * 4 * D if w == 4 else (3 + 2) * 2 * D
    everything = 2 * 8 * D + outputs + w * (2 * q + 2 * kv) + 4 * w * F
    kept = {
        "none": everything,
        "selective": 4 * D + w * (2 * q + 2 * kv + 2 * D + 2 * F),
        "full": 4 * D,
    }[pretrain.activation_checkpointing]
    again = 0 if pretrain.activation_checkpointing == "none" else everything
    return model.num_hidden_layers * kept + again


def _logits_bytes(config: Config, width: int) -> float:
    """Return logits as the product gives them, in fp32, and normalized, and their gradient; of a chunk or the pass."""
    vocab_size, chunk, tokens = config.tokenize.vocab_size, config.pretrain.loss_chunk_size, tokens_per_pass(config)
    if chunk is None:
        return float(tokens * vocab_size * (width + 12))
    table = 4.0 * vocab_size * config.model.hidden_size  # the head's gradient, summed up over chunks
    return min(chunk, tokens) * vocab_size * (width + 12) + table + 4.0 * tokens * config.model.hidden_size
