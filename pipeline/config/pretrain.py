"""The sections `model` and `pretrain`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from pipeline.config.stage import StageSection
from pipeline.config.types import LINE, MOST, REAL, TIME_OR_NONE, WHOLE, Section, broken_rule


def _betas(value: object) -> object:
    if isinstance(value, list | tuple) and len(value) != 2:
        raise broken_rule("exactly two numbers are needed; write for example [0.9, 0.95]")
    return value


def _compile(value: object) -> object:
    if value == "auto" or isinstance(value, bool):
        return value
    raise broken_rule("is not one of auto, true, false; write one of them")


class ModelConfig(Section):
    """The Llama-family Transformer, in the key names of Hugging Face."""

    hidden_size: Annotated[int, Field(ge=2, le=1_000_000, description="width of the residual stream"), WHOLE] = 192
    intermediate_size: Annotated[
        int, Field(ge=1, le=10_000_000, description="width of the feed-forward layer"), WHOLE
    ] = 512
    num_hidden_layers: Annotated[int, Field(ge=1, le=10_000, description="layers"), WHOLE] = 6
    num_attention_heads: Annotated[int, Field(ge=1, le=10_000, description="attention heads"), WHOLE] = 6
    num_key_value_heads: Annotated[
        int | None,
        Field(ge=1, le=10_000, description="key/value heads (grouped-query attention); null: num_attention_heads"),
        WHOLE,
    ] = None
    rope_theta: Annotated[float, Field(ge=1, le=1e12, description="base of the rotary embedding"), REAL] = 10_000.0
    rms_norm_eps: Annotated[float, Field(gt=0, le=0.1, description="epsilon of the norms"), REAL] = 1e-5
    tie_word_embeddings: Annotated[bool, Field(description="use the embedding as the output head")] = True
    qk_norm: Annotated[bool, Field(description="normalize queries and keys (Qwen3)")] = False

    @property
    def kv_heads(self) -> int:
        """Return the number of key/value heads, given or not."""
        return self.num_key_value_heads or self.num_attention_heads


class PretrainConfig(StageSection):
    """Training."""

    nodes: Annotated[int, Field(ge=1, le=100_000, description="nodes that train together"), WHOLE] = 1
    time_min: Annotated[
        str | None,
        Field(
            description="shortest time limit that Slurm may give a Segment instead of `time`, to fit it into a hole of "
            "its schedule (sbatch --time-min); null: none",
            examples=["1:00:00"],
        ),
        TIME_OR_NONE,
    ] = None
    segments: Annotated[
        int | None,
        Field(ge=1, le=10_000, description="Slurm Jobs that the training is cut into; null: as many as its time needs"),
        WHOLE,
    ] = None
    nproc_per_node: Annotated[int, Field(ge=1, le=1024, description="ranks on one node, one per GPU"), WHOLE] = 1
    init_from: Annotated[
        str | None,
        Field(description="a folder in Hugging Face's form to begin from: a model of this shape; null: random weights"),
        LINE,
    ] = None
    max_steps: Annotated[int, Field(ge=1, le=MOST, description="optimizer steps in all"), WHOLE] = 1000
    global_batch_size: Annotated[
        int, Field(ge=1, le=MOST, description="sequences per optimizer step, over all ranks"), WHOLE
    ] = 16
    micro_batch_size: Annotated[
        int | None,
        Field(ge=1, le=MOST, description="sequences per rank and forward pass; null: all of a rank's share"),
        WHOLE,
    ] = None
    sequence_length: Annotated[int, Field(ge=2, le=10_000_000, description="tokens in one sequence"), WHOLE] = 512
    document_attention: Annotated[
        Literal["packed", "separate"],
        Field(description="packed: a token sees the documents before its own in a sequence; separate: only its own"),
    ] = "packed"
    optimizer: Annotated[
        Literal["muon", "adamw"], Field(description="muon: Muon for matrices inside layers, AdamW for the rest")
    ] = "muon"
    learning_rate: Annotated[float, Field(gt=0, le=100, description="peak learning rate of AdamW"), REAL] = 3e-3
    muon_learning_rate: Annotated[float, Field(gt=0, le=100, description="peak learning rate of Muon"), REAL] = 2e-2
    muon_momentum: Annotated[float, Field(ge=0, lt=1, description="momentum of Muon"), REAL] = 0.95
    weight_decay: Annotated[float, Field(ge=0, le=10, description="decoupled weight decay"), REAL] = 0.1
    betas: Annotated[
        tuple[Annotated[float, Field(ge=0, lt=1), REAL], Annotated[float, Field(ge=0, lt=1), REAL]],
        Field(strict=False, description="AdamW's betas"),
        BeforeValidator(_betas),
    ] = (0.9, 0.95)
    grad_clip: Annotated[float, Field(ge=0, le=1e6, description="largest norm of the gradient; 0: off"), REAL] = 1.0
    warmup_steps: Annotated[
        int, Field(ge=0, le=MOST, description="steps in which the learning rate rises from 0"), WHOLE
    ] = 50
    schedule: Annotated[
        Literal["wsd", "cosine", "linear", "constant"], Field(description="learning rate after the warm-up")
    ] = "wsd"
    decay_fraction: Annotated[
        float, Field(gt=0, le=1, description="wsd: share of max_steps in which the learning rate falls"), REAL
    ] = 0.3
    min_learning_rate_ratio: Annotated[
        float, Field(ge=0, le=1, description="learning rate at the end, as a share of the peak"), REAL
    ] = 0.0
    z_loss: Annotated[
        float, Field(ge=0, le=1, description="share of log(Z)^2 in the gradient, keeps logits small; 0: off"), REAL
    ] = 0.0
    parallel: Annotated[
        Literal["ddp", "fsdp", "hsdp"],
        Field(
            description="ddp: each rank has the whole model; fsdp: all ranks share one; hsdp: the ranks of a node do"
        ),
    ] = "ddp"
    activation_checkpointing: Annotated[
        Literal["none", "selective", "full"],
        Field(
            description="what layers compute anew in the backward pass to save memory; selective: all but the products"
        ),
    ] = "none"
    loss_chunk_size: Annotated[
        int | None,
        Field(ge=1, le=MOST, description="tokens whose logits are in memory at once; null: all of a forward pass"),
        WHOLE,
    ] = None
    precision: Annotated[
        Literal["auto", "fp32", "bf16"], Field(description="of the forward pass; auto: bf16 where the GPU has it")
    ] = "auto"
    compile: Annotated[
        Literal["auto"] | bool,
        Field(
            description="torch.compile; true: an error without a compiler; auto: where there is one, on a CPU if the "
            "training takes minutes"
        ),
        BeforeValidator(_compile),
    ] = "auto"
    peak_tflops: Annotated[
        float | None,
        Field(
            gt=0, le=1e9, description="TFLOP/s that one rank could make at best, for MFU; null: its GPU's data sheet"
        ),
        REAL,
    ] = None
    mfu: Annotated[float, Field(gt=0, le=1, description="share of peak_tflops that plan reckons hours with"), REAL] = (
        0.4
    )
    memory_gb: Annotated[
        float | None,
        Field(gt=0, le=1e6, description="memory of a rank's GPU, GB; what is estimated to need more is refused"),
        REAL,
    ] = None
    save_interval: Annotated[int, Field(ge=1, le=MOST, description="steps between checkpoints"), WHOLE] = 250
    log_interval: Annotated[int, Field(ge=1, le=MOST, description="steps between lines of metrics"), WHOLE] = 10
    sinks: Annotated[
        list[Literal["tensorboard", "wandb"]],
        Field(description="where metrics also go: files in the Run's folder sinks; wandb is offline by default"),
    ] = []
    keep_last: Annotated[
        int, Field(ge=1, le=1_000_000, description="newest checkpoints to keep; the first is always kept"), WHOLE
    ] = 3
    keep_every: Annotated[
        int | None, Field(ge=1, le=MOST, description="steps whose multiples are kept for good; null: none"), WHOLE
    ] = None
    on_divergence: Annotated[
        Literal["stop", "rollback"],
        Field(description="rollback: go back and skip those batches when loss or gradient is not finite, or spikes"),
    ] = "stop"
    max_rollbacks: Annotated[
        int, Field(ge=0, le=1_000_000, description="rollbacks in all; then a divergence stops, a spike does not"), WHOLE
    ] = 3
    spike_threshold: Annotated[
        float | None,
        Field(gt=0, le=1e6, description="standard deviations above its mean at which a loss is a spike; null: off"),
        REAL,
    ] = None
    spike_window: Annotated[
        int, Field(ge=2, le=1_000_000, description="steps that this mean and deviation are taken over"), WHOLE
    ] = 128
    hang_timeout: Annotated[
        float,
        Field(gt=0, le=1e6, description="seconds for a step or a save; then all ranks print stacks and end"),
        REAL,
    ] = 300.0
    first_step_timeout: Annotated[
        float, Field(gt=0, le=1e6, description="seconds from the start to the end of the first step"), REAL
    ] = 1800.0
    straggler_threshold: Annotated[
        float, Field(gt=0, le=1e6, description="share by which a rank is slower than the median to be named"), REAL
    ] = 0.3
