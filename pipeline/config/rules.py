"""Rules between the keys of a Config."""

from __future__ import annotations

from pipeline.config.checks import Rule
from pipeline.config.schema import Config
from pipeline.plan import sizes
from pipeline.slurm.time_limits import time_seconds

USABLE = 0.9  # of a GPU's memory: the rest goes to CUDA, NCCL and what the allocator cannot use


def fitting(value: int, unit: int) -> str:
    """Name the multiples of `unit` next to `value`."""
    below, above = value // unit * unit, -(-value // unit) * unit
    return f"{below} or {above}" if below else f"{above}"


def batch_problem(global_batch_size: int, ranks: int, micro_batch_size: int | None) -> str | None:
    """Say why a global batch cannot be shared out evenly over `ranks` (all nodes together), or return None."""
    unit = ranks * (micro_batch_size or 1)
    if global_batch_size % unit == 0:
        return None
    micro = "" if micro_batch_size is None else f" x micro_batch_size {micro_batch_size} = {unit}"
    return (
        f"{global_batch_size} sequences cannot be shared out evenly over {ranks} ranks{micro}; "
        f"set global_batch_size to {fitting(global_batch_size, unit)}"
    )


def _batch(config: Config) -> str | None:
    pretrain = config.pretrain
    return batch_problem(
        pretrain.global_batch_size, pretrain.nodes * pretrain.nproc_per_node, pretrain.micro_batch_size
    )


def _weights(config: Config) -> str | None:
    without = [number for number, source in enumerate(config.data, start=1) if source.weight is None]
    if not without or len(without) == len(config.data):
        return None
    items = ", ".join(map(str, without))
    return f"some sources have a weight, but item {items} has none; give each source a weight, or none"


def _heads(config: Config) -> str | None:
    width, heads = config.model.hidden_size, config.model.num_attention_heads
    if width % heads:
        return (
            f"hidden_size {width} is not a multiple of num_attention_heads {heads}; "
            f"set hidden_size to {fitting(width, 2 * heads)}"
        )
    if width // heads % 2:
        return (
            f"hidden_size {width} / num_attention_heads {heads} = {width // heads}, but the size of a head "
            f"must be even (rotary embedding works on pairs); set hidden_size to {fitting(width, 2 * heads)}"
        )
    return None


def _key_value_heads(config: Config) -> str | None:
    heads, shared = config.model.num_attention_heads, config.model.kv_heads
    if heads % shared == 0:
        return None
    divisors = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
    return (
        f"num_attention_heads {heads} is not a multiple of num_key_value_heads {shared}; "
        f"set num_key_value_heads to one of {divisors}"
    )


def _warmup(config: Config) -> str | None:
    warmup, steps = config.pretrain.warmup_steps, config.pretrain.max_steps
    if warmup <= steps:
        return None
    return f"warmup_steps {warmup} is more than max_steps {steps}; set warmup_steps to {steps} or less"


def _decay(config: Config) -> str | None:
    pretrain = config.pretrain
    decay = round(pretrain.decay_fraction * pretrain.max_steps)
    room = pretrain.max_steps - pretrain.warmup_steps
    if pretrain.schedule != "wsd" or room < 0 or decay <= room:
        return None
    return (
        f"schedule wsd: warmup_steps {pretrain.warmup_steps} and a decay of {decay} steps "
        f"(decay_fraction {pretrain.decay_fraction} x max_steps {pretrain.max_steps}) do not fit into max_steps; "
        f"set warmup_steps to {pretrain.max_steps - decay} or less, or lower decay_fraction"
    )


def _new_tokens(config: Config) -> str | None:
    tokens, length = config.inference.max_new_tokens, config.pretrain.sequence_length
    if tokens + 1 <= length:
        return None
    return (
        f"max_new_tokens {tokens} and at least one token of prompt are more than pretrain.sequence_length {length}; "
        f"set max_new_tokens to {length - 1} or less"
    )


def _stride(config: Config) -> str | None:
    stride, length = config.evaluate.stride, config.pretrain.sequence_length
    if stride is None or stride <= length:
        return None
    return f"stride {stride} is more than pretrain.sequence_length {length}; set stride to {length} or less"


def _time_min(config: Config) -> str | None:
    least, time = config.pretrain.time_min, config.pretrain.time
    if least is None or time_seconds(least) <= time_seconds(time):
        return None
    return f"time_min {least} is more than pretrain.time {time}; lower it, or leave it out"


def _gate(config: Config) -> str | None:
    names = [benchmark.name for benchmark in config.evaluate.benchmarks]
    unknown = next((rule.benchmark for rule in config.evaluate.gate if rule.benchmark not in names), None)
    if unknown is None:
        return None
    return f"a rule is about {unknown}, which is not scored; name one of {', '.join(names)}, or add it to benchmarks"


def _top_k(config: Config) -> str | None:
    top_k, vocabulary = config.inference.top_k, config.tokenize.vocab_size
    if top_k is None or top_k <= vocabulary or config.tokenize.tokenizer is not None:  # that file has its own size
        return None
    return f"top_k {top_k} is more than tokenize.vocab_size {vocabulary}; set top_k to {vocabulary} or less"


def _init_from(config: Config) -> str | None:
    if config.pretrain.init_from is None or config.tokenize.tokenizer is not None:
        return None
    return (
        "init_from takes a model over, whose ids mean nothing to a tokenizer that is trained anew; "
        "set tokenize.tokenizer to the model's own, for example the tokenizer.model in its folder"
    )


def _memory(config: Config) -> str | None:
    limit, needed = config.pretrain.memory_gb, sizes.memory(config).total / 1e9
    if limit is None or needed <= limit * USABLE:
        return None
    return (
        f"a rank would need about {needed:.1f} GB, of {limit:g} GB {USABLE:.0%} can be counted on; lower "
        "micro_batch_size or loss_chunk_size, set activation_checkpointing to selective or full, or parallel to fsdp"
    )


RULES: list[Rule[Config]] = [
    Rule(("pretrain.time_min", "pretrain.time"), _time_min),
    Rule(("data",), _weights),
    Rule(
        ("pretrain.global_batch_size", "pretrain.micro_batch_size", "pretrain.nproc_per_node", "pretrain.nodes"),
        _batch,
    ),
    Rule(("model.hidden_size", "model.num_attention_heads"), _heads),
    Rule(("model.num_key_value_heads", "model.num_attention_heads"), _key_value_heads),
    Rule(("pretrain.warmup_steps", "pretrain.max_steps"), _warmup),
    Rule(
        ("pretrain.warmup_steps", "pretrain.decay_fraction", "pretrain.max_steps", "pretrain.schedule"),
        _decay,
    ),
    Rule(
        (
            "pretrain.memory_gb",
            "pretrain.micro_batch_size",
            "pretrain.loss_chunk_size",
            "pretrain.activation_checkpointing",
            "pretrain.parallel",
        ),
        _memory,
    ),
    Rule(("inference.max_new_tokens", "pretrain.sequence_length"), _new_tokens),
    Rule(("pretrain.init_from", "tokenize.tokenizer"), _init_from),
    Rule(("evaluate.stride", "pretrain.sequence_length"), _stride),
    Rule(("evaluate.gate", "evaluate.benchmarks"), _gate),
    Rule(("inference.top_k", "tokenize.vocab_size", "tokenize.tokenizer"), _top_k),
]
