"""The section `inference`."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from pipeline.config_stage import SEED, StageSection
from pipeline.config_types import REAL, WHOLE, broken_rule, one_or_more


def _prompt(value: object) -> object:
    if value == "":
        raise broken_rule("is an empty prompt; write at least one character for the model to go on from")
    return value


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
