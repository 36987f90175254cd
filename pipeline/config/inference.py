"""The section `inference`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from pipeline.config.stage import SEED, StageSection
from pipeline.config.types import LINE, REAL, WHOLE, broken_rule, one_or_more


def _prompt(value: object) -> object:
    if value == "":
        raise broken_rule("is an empty prompt; write at least one character for the model to go on from")
    return value


def _stop(value: object) -> object:
    if value == "":
        raise broken_rule("is an empty text, which every text holds; write the characters to stop at")
    return value


def _stops(value: object) -> object:
    return [value] if isinstance(value, str) else value


class InferenceConfig(StageSection):
    """Text sampled from the last checkpoint."""

    prompts: Annotated[
        list[Annotated[str, BeforeValidator(_prompt)]],
        Field(description="texts for the model to go on from"),
        BeforeValidator(one_or_more, json_schema_input_type=str | list[str]),
    ] = ["def "]
    prompts_file: Annotated[
        str | None,
        Field(description="a .jsonl file (field `prompt`) or .txt file (one a line) of prompts instead"),
        LINE,
    ] = None
    long_prompts: Annotated[
        Literal["refuse", "cut"],
        Field(description="prompts beyond the context; cut: their end, with room for max_new_tokens"),
    ] = "refuse"
    batch_size: Annotated[
        int, Field(ge=1, le=4096, description="prompts at a time; the text of each is the same whatever it is"), WHOLE
    ] = 16
    precision: Annotated[
        Literal["auto", "fp32", "bf16"], Field(description="of the weights; auto: bf16 where the GPU has it")
    ] = "auto"
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
    min_p: Annotated[
        float | None,
        Field(gt=0, le=1, description="sample from tokens at least this share as likely as the likeliest; null: all"),
        REAL,
    ] = None
    stop: Annotated[
        list[Annotated[str, BeforeValidator(_stop)]],
        Field(description="texts at which a completion ends; they are no part of it"),
        BeforeValidator(_stops, json_schema_input_type=str | list[str]),
    ] = []
    seed: Annotated[int, SEED, WHOLE] = 0
    target_tokens_per_s: Annotated[
        float | None, Field(gt=0, le=1e9, description="new tokens per second, all prompts together, to reach"), REAL
    ] = None
    target_first_token_p50: Annotated[
        float | None,
        Field(gt=0, le=1e6, description="seconds to the first token, not to exceed by half of all prompts"),
        REAL,
    ] = None
    target_first_token_p95: Annotated[
        float | None, Field(gt=0, le=1e6, description="the same, for 95 % of all prompts"), REAL
    ] = None
