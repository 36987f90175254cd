"""What the user wants: one YAML file, validated as a whole before anything happens.

Each section is in the module of its name, rules between keys are in rules.py, loading is in load.py.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field

from pipeline.config.evaluate import EvaluateConfig
from pipeline.config.hints import ELSEWHERE
from pipeline.config.inference import InferenceConfig
from pipeline.config.preflight import PreflightConfig
from pipeline.config.pretrain import ModelConfig, PretrainConfig
from pipeline.config.stage import SEED
from pipeline.config.tokenize import STDLIB, DataSource, TokenizeConfig
from pipeline.config.types import LINE, NAMED, WHOLE, Section, broken_rule


def _sources(value: object) -> object:
    if isinstance(value, str | dict | DataSource):
        return [value]
    if isinstance(value, list) and not value:
        raise broken_rule("is an empty list; write for example `data: python-stdlib`")
    return value


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
