"""What the user wants: one YAML file, validated as a whole before anything happens.

The sections and the rules of single keys. Rules between keys are in config_rules.py, loading in config_load.py.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from pipeline.config_hints import ELSEWHERE
from pipeline.config_types import LINE, MOST, NAMED, REAL, WHOLE, Section, Time, broken_rule, one_or_more
from pipeline.slurm_options import SbatchOptions, SrunOptions

STDLIB = "python-stdlib"
HUB = "hf:"
SEED = Field(ge=0, le=2**32 - 1, description="seed of the random numbers")


def _prompt(value: object) -> object:
    if value == "":
        raise broken_rule("is an empty prompt; write at least one character for the model to go on from")
    return value


def _betas(value: object) -> object:
    if isinstance(value, list | tuple) and len(value) != 2:
        raise broken_rule("exactly two numbers are needed; write for example [0.9, 0.95]")
    return value


def _compile(value: object) -> object:
    if value == "auto" or isinstance(value, bool):
        return value
    raise broken_rule("is not one of auto, true, false; write one of them")


def _sources(value: object) -> object:
    if isinstance(value, str | dict | DataSource):
        return [value]
    if isinstance(value, list) and not value:
        raise broken_rule("is an empty list; write for example `data: python-stdlib`")
    return value


class StageSection(Section):
    """What every stage's Job may ask for; these keys may change on an existing Run."""

    time: Annotated[
        Time,
        Field(description="time limit of a Job: D-HH:MM:SS, D-HH, HH:MM:SS, MM:SS or minutes; rounded up to minutes"),
    ] = "1:00:00"
    sbatch: Annotated[
        SbatchOptions,
        Field(
            description="options of sbatch over those of the cluster file: Slurm's names without dashes",
            examples=["{partition: gpu}"],
        ),
    ] = {}
    srun: Annotated[
        SrunOptions,
        Field(description="options of srun, over those of the cluster file", examples=["{cpu-bind: cores}"]),
    ] = {}


class DataSource(Section):
    """One source of documents: files on disk, or a Hugging Face dataset."""

    path: Annotated[
        str | None, Field(description="file, glob or folder of text, JSON lines or parquet; or `python-stdlib`"), LINE
    ] = None
    dataset: Annotated[
        str | None,
        Field(description="`owner/name` on the Hugging Face hub, or a folder (with a `/` or `./` before it)"),
        LINE,
    ] = None
    config: Annotated[str | None, Field(description="the dataset's configuration, where it has several"), LINE] = None
    split: Annotated[str, Field(description="the dataset's split"), LINE] = "train"
    text_field: Annotated[
        str, Field(description="field of JSON lines, parquet columns and datasets that holds the text"), LINE
    ] = "text"

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        """Read `hf:owner/name` and plain paths."""
        if not isinstance(value, str):
            return value
        return {"dataset": value.removeprefix(HUB)} if value.startswith(HUB) else {"path": value}

    @model_validator(mode="after")
    def _one_place(self) -> DataSource:
        if (self.path is None) == (self.dataset is None):
            raise broken_rule("needs exactly one of path and dataset; remove or add one")
        if self.config is not None and self.dataset is None:
            raise broken_rule("has the key config, which belongs to a dataset; remove it")
        return self


class PreflightConfig(StageSection):
    """A look at the nodes, their network and the Run's folder, before each attempt of training."""

    time: Annotated[Time, Field(description="time limit of a Job that does only this")] = "15:00"
    enabled: Annotated[bool, Field(description="look before each attempt of training")] = True
    min_bus_gbps: Annotated[
        float | None,
        Field(gt=0, le=1e6, description="bus bandwidth of an all-reduce over all ranks, GB/s; null: only reported"),
        REAL,
    ] = None
    min_free_bytes: Annotated[
        int | None,
        Field(ge=0, le=10**18, description="free in the Run's folder; null: `pretrain.keep_last` + 1 checkpoints"),
        WHOLE,
    ] = None
    max_clock_skew: Annotated[
        float, Field(gt=0, le=1e6, description="seconds by which the nodes' clocks may differ"), REAL
    ] = 5.0
    timeout: Annotated[
        float, Field(gt=0, le=1e5, description="seconds for all nodes to arrive, and for the all-reduce"), REAL
    ] = 180.0


class TokenizeConfig(StageSection):
    """Text to token shards, with a tokenizer trained on the way."""

    vocab_size: Annotated[
        int,
        # 256 bytes for byte fallback and 4 control pieces leave 40 for the text's own characters.
        Field(ge=300, le=1_000_000, description="tokens in the vocabulary; 256 of them are single bytes"),
        WHOLE,
    ] = 4096
    model_type: Annotated[Literal["bpe", "unigram"], Field(description="SentencePiece algorithm")] = "bpe"
    tokenizer: Annotated[
        str | None, Field(description="an existing SentencePiece model to use instead of training one"), LINE
    ] = None
    training_bytes: Annotated[
        int,
        Field(ge=1000, le=MOST, description="bytes of text the tokenizer is trained on, spread evenly over the corpus"),
        WHOLE,
    ] = 20_000_000
    validation_fraction: Annotated[
        float, Field(gt=0, le=0.5, description="share of documents kept for validation, by hash of the text"), REAL
    ] = 0.06
    max_malformed_share: Annotated[
        float,
        Field(ge=0, le=1, description="share of lines that may be broken: not JSON, without the field, not UTF-8"),
        REAL,
    ] = 0.0
    shard_tokens: Annotated[int, Field(ge=1, le=MOST, description="tokens in one shard file"), WHOLE] = 100_000_000


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
    segments: Annotated[
        int | None,
        Field(ge=1, le=10_000, description="Slurm Jobs that the training is cut into; null: as many as its time needs"),
        WHOLE,
    ] = None
    nproc_per_node: Annotated[int, Field(ge=1, le=1024, description="ranks on one node, one per GPU"), WHOLE] = 1
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
    precision: Annotated[
        Literal["auto", "fp32", "bf16"], Field(description="of the forward pass; auto: bf16 where the GPU has it")
    ] = "auto"
    compile: Annotated[
        Literal["auto"] | bool,
        Field(description="torch.compile; true: an error without a C compiler, auto: a warning"),
        BeforeValidator(_compile),
    ] = "auto"
    save_interval: Annotated[int, Field(ge=1, le=MOST, description="steps between checkpoints"), WHOLE] = 250
    log_interval: Annotated[int, Field(ge=1, le=MOST, description="steps between lines of metrics"), WHOLE] = 10
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


class EvaluateConfig(StageSection):
    """Scores of the checkpoints on the validation text."""

    checkpoints: Annotated[
        list[Literal["first", "last", "all"]],
        Field(description="which checkpoints are scored; a list of first, last, all"),
        BeforeValidator(one_or_more, json_schema_input_type=str | list[Literal["first", "last", "all"]]),
    ] = ["first", "last"]
    stride: Annotated[
        int | None,
        Field(ge=1, le=10_000_000, description="tokens scored per window; null: half of pretrain.sequence_length"),
        WHOLE,
    ] = None
    batch_size: Annotated[int, Field(ge=1, le=1_000_000, description="windows per forward pass"), WHOLE] = 16


class InferenceConfig(StageSection):
    """Text sampled from the last checkpoint."""

    prompts: Annotated[
        list[Annotated[str, BeforeValidator(_prompt)]],
        Field(description="texts for the model to go on from"),
        BeforeValidator(one_or_more, json_schema_input_type=str | list[str]),
    ] = ["def "]
    max_new_tokens: Annotated[int, Field(ge=1, le=10_000_000, description="tokens to sample per prompt"), WHOLE] = 128
    temperature: Annotated[
        float, Field(ge=0, le=100, description="0: always the likeliest token; 1: the model's own probabilities"), REAL
    ] = 0.8
    top_k: Annotated[
        int | None, Field(ge=1, le=1_000_000, description="sample from the k likeliest tokens; null: from all"), WHOLE
    ] = None
    top_p: Annotated[
        float | None,
        Field(gt=0, le=1, description="sample from the likeliest tokens that make up this probability; null: from all"),
        REAL,
    ] = None
    seed: Annotated[int, SEED, WHOLE] = 0


class Config(Section):
    """One Run of the whole chain."""

    other_names: ClassVar[dict[str, str]] = ELSEWHERE

    name: Annotated[
        str,
        Field(description="name of the Run and its folder: 1 to 64 letters, digits, `.`, `_`, `-`"),
        NAMED,
    ]
    seed: Annotated[int, SEED, WHOLE] = 1
    runs_dir: Annotated[str, Field(description="folder of all Runs; relative: inside the project"), LINE] = "runs"
    threads: Annotated[
        int | None, Field(ge=1, le=4096, description="CPU threads per rank; null: cores / ranks"), WHOLE
    ] = None
    data: Annotated[
        list[DataSource],
        Field(description="where the text comes from: one source or a list of them"),
        BeforeValidator(_sources, json_schema_input_type=str | DataSource | list[str | DataSource]),
    ] = [DataSource(path=STDLIB)]
    preflight: PreflightConfig = PreflightConfig()
    tokenize: TokenizeConfig = TokenizeConfig()
    model: ModelConfig = ModelConfig()
    pretrain: PretrainConfig = PretrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    inference: InferenceConfig = InferenceConfig()
