"""The section `evaluate`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from pipeline.config_stage import StageSection
from pipeline.config_types import WHOLE, one_or_more


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
