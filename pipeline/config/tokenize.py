"""The section `tokenize`, and the sources of text: the keys of `data`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from pipeline.config.stage import StageSection
from pipeline.config.types import LINE, MOST, REAL, WHOLE, Section, broken_rule

STDLIB = "python-stdlib"
HUB = "hf:"


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
    revision: Annotated[
        str | None,
        Field(
            description="the dataset's commit or tag on the hub; null: what is there, whose commit an event tells",
            examples=["0123abcd"],
        ),
        LINE,
    ] = None
    text_field: Annotated[
        str, Field(description="field of JSON lines, parquet columns and datasets that holds the text"), LINE
    ] = "text"

    weight: Annotated[
        float | None,
        Field(
            gt=0, le=1e9, description="share of the training sequences, relative to the others; null: all text alike"
        ),
        REAL,
    ] = None

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
        if self.revision is not None and self.dataset is None:
            raise broken_rule("has the key revision, which belongs to a dataset; remove it")
        return self


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
    drop_duplicates: Annotated[
        bool, Field(description="leave out documents whose text was there before; false: only count them")
    ] = True
    processes: Annotated[
        int | None,
        Field(ge=1, le=4096, description="processes of a Job; null: as many as `threads`, else one per core"),
        WHOLE,
    ] = None
    array_tasks: Annotated[
        int,
        Field(ge=1, le=100_000, description="Slurm: tasks of a Job array that share the work; 1: a single Job"),
        WHOLE,
    ] = 1
    max_running_tasks: Annotated[
        int | None, Field(ge=1, le=100_000, description="tasks of the array that run at a time; null: all"), WHOLE
    ] = None

    @classmethod
    def keys_of_no_effect(cls) -> set[str]:
        """Name the keys that decide how the work is done, and not what comes out."""
        return {*StageSection.model_fields, "processes", "array_tasks", "max_running_tasks", "max_malformed_share"}
