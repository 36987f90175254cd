"""What a Config costs, with the arithmetic: parameters, FLOPs, memory of a rank, checkpoint, hours."""

from __future__ import annotations

from pipeline.config.schema import Config
from pipeline.plan import sizes
from pipeline.units import size


def estimate(config: Config) -> dict[str, str]:
    """List what follows from the Config alone: name -> value with its arithmetic."""
    model, pretrain, vocab_size = config.model, config.pretrain, config.tokenize.vocab_size
    flops = sizes.flops_per_token(model, vocab_size, pretrain.sequence_length)
    weights = sizes.layer_parameters(model) + vocab_size * model.hidden_size
    tokens = sizes.tokens_per_step(config)
    head = "tied head" if model.tie_word_embeddings else "head of its own"
    whole = sizes.checkpoint_bytes(config)
    return {
        "parameters": f"{sizes.num_parameters(model, vocab_size):,} = {sizes.layer_parameters(model):,} in "
        f"{model.num_hidden_layers} layers + embedding of {vocab_size:,} x {model.hidden_size} ({head}) + norms",
        "FLOPs per token": f"{flops:.3g} = 6 N + 12 L D T = 6 x {weights:,} + 12 x {model.num_hidden_layers} x "
        f"{model.hidden_size} x {pretrain.sequence_length}",
        "tokens per step": f"{tokens:,} = {pretrain.global_batch_size} sequences x {pretrain.sequence_length}",
        "tokens in all": f"{tokens * pretrain.max_steps:,} = {pretrain.max_steps:,} steps x {tokens:,}",
        "FLOPs in all": f"{sizes.total_flops(config):.3g}",
        "checkpoint": f"{size(whole)}: fp32 weights and optimizer state; {size(whole / ranks(config))} per rank",
        **_memory(config),
        **_hours(config, sizes.total_flops(config)),
    }


def ranks(config: Config) -> int:
    return config.pretrain.nodes * config.pretrain.nproc_per_node


def _memory(config: Config) -> dict[str, str]:
    memory, parts, passed = sizes.memory(config), sizes.shards(config), sizes.tokens_per_pass(config)
    over = f", each shared by {parts} ranks" if parts > 1 else ""
    return {
        "memory per rank": f"{size(memory.total)}, estimated = weights {size(memory.weights)} + gradients "
        f"{size(memory.gradients)} + optimizer {size(memory.optimizer)}{over} + {'gathered' if parts > 1 else 'bf16'} "
        f"copies {size(memory.copies)} + activations {size(memory.activations)} + logits {size(memory.logits)}",
        "activations": f"{size(memory.activations)} = {passed:,} tokens of a forward pass x "
        f"{size(sizes.activation_bytes(config))}, checkpointing {config.pretrain.activation_checkpointing}",
    }


def _hours(config: Config, flops: float) -> dict[str, str]:
    peak, mfu = config.pretrain.peak_tflops, config.pretrain.mfu
    if peak is None:
        return {"training time": "not known; give pretrain.peak_tflops, the peak of one rank"}
    hours = sizes.training_seconds(flops, ranks(config), peak, mfu) / 3600
    return {
        "training time": f"{hours:,.3g} h = {flops:.3g} FLOPs / "
        f"({ranks(config)} ranks x {peak:g} TFLOP/s x {mfu:.0%} MFU)",
        "rank-hours": f"{hours * ranks(config):,.0f} = {hours:,.3g} h x {ranks(config)} ranks",
    }
