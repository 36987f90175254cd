"""The section `evaluate`: which checkpoints and Benchmarks, how they are cut into Units, what a Score sets off."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from pipeline.config.stage import StageSection
from pipeline.config.types import LINE, NAMED, REAL, WHOLE, Section, broken_rule, one_or_more

BITS_PER_BYTE = "bits_per_byte"
PYTHON_DOCS = "python-docs"
Kind = Literal["bits_per_byte", "multiple_choice", "cloze", "lm_eval"]


class BenchmarkSource(Section):
    """One Benchmark: bits per byte of the validation text, questions of a file, or a task of lm-evaluation-harness."""

    name: Annotated[str, Field(description="name of its Scores"), NAMED]
    kind: Annotated[Kind, Field(description="how it is scored")] = "multiple_choice"
    path: Annotated[
        str | None,
        Field(description="file of JSON lines, or `python-docs`; of lm_eval: folder of tasks (code), null: its own"),
        LINE,
    ] = None

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        """Read `bits_per_byte` and `python-docs`."""
        if value == BITS_PER_BYTE:
            return {"name": BITS_PER_BYTE, "kind": BITS_PER_BYTE}
        if value == PYTHON_DOCS:
            return {"name": PYTHON_DOCS, "kind": "multiple_choice", "path": PYTHON_DOCS}
        if isinstance(value, str):
            raise broken_rule(
                f"is not one of {BITS_PER_BYTE}, {PYTHON_DOCS}; write one of them, or a mapping of name, kind and path"
            )
        return value

    @model_validator(mode="after")
    def _has_questions(self) -> BenchmarkSource:
        if (self.kind == BITS_PER_BYTE) != (self.name == BITS_PER_BYTE):
            raise broken_rule(f"needs the name {BITS_PER_BYTE} for the kind {BITS_PER_BYTE}, and for no other; mend it")
        if self.kind in ("multiple_choice", "cloze") and self.path is None:
            raise broken_rule(f"needs a path to its questions, or {PYTHON_DOCS}; add one")
        if self.kind == BITS_PER_BYTE and self.path is not None:
            raise broken_rule("has a path, and bits per byte are those of the validation text; remove it")
        return self


class GateRule(Section):
    """What is done about a Score: an event is written, or the chain stops as if a person had said so."""

    benchmark: Annotated[str, Field(description="name of a Benchmark"), NAMED] = BITS_PER_BYTE
    worse_than_best_by: Annotated[
        float | None, Field(ge=0, le=1e6, description="holds for a Score that much worse than the best before it"), REAL
    ] = None
    below: Annotated[float | None, Field(ge=-1e6, le=1e6, description="holds for a Score under this"), REAL] = None
    above: Annotated[float | None, Field(ge=-1e6, le=1e6, description="holds for a Score over this"), REAL] = None
    action: Annotated[
        Literal["event", "stop"], Field(description="event: a line in events.jsonl; stop: the chain ends too")
    ] = "event"

    @model_validator(mode="after")
    def _one_bound(self) -> GateRule:
        if [self.worse_than_best_by, self.below, self.above].count(None) != 2:
            raise broken_rule("needs exactly one of worse_than_best_by, below and above; remove or add one")
        return self


def _one_or_more(value: object) -> object:
    return one_or_more([value] if isinstance(value, dict | Section) else value)


def _once(value: list[BenchmarkSource]) -> list[BenchmarkSource]:
    names = [benchmark.name for benchmark in value]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise broken_rule(f"names the Benchmark {twice} twice, whose Scores are one file; give one another name")
    return value


class EvaluateConfig(StageSection):
    """Scores of the checkpoints. Each Benchmark of a checkpoint is cut into Units, which Jobs of any size work off."""

    checkpoints: Annotated[
        list[Literal["first", "last", "all"]],
        Field(description="which checkpoints are scored; a list of first, last, all"),
        BeforeValidator(one_or_more, json_schema_input_type=str | list[Literal["first", "last", "all"]]),
    ] = ["first", "last"]
    benchmarks: Annotated[
        list[BenchmarkSource],
        Field(
            description="bits_per_byte, python-docs, or mappings of name, kind and path",
            examples=["[bits_per_byte, python-docs]"],
        ),
        BeforeValidator(_one_or_more, json_schema_input_type=str | BenchmarkSource | list[str | BenchmarkSource]),
        AfterValidator(_once),
    ] = [BenchmarkSource(name=BITS_PER_BYTE, kind="bits_per_byte")]
    stride: Annotated[
        int | None,
        Field(ge=1, le=10_000_000, description="tokens scored per window; null: half of pretrain.sequence_length"),
        WHOLE,
    ] = None
    batch_size: Annotated[int, Field(ge=1, le=1_000_000, description="windows per forward pass"), WHOLE] = 16
    unit_seconds: Annotated[
        float,
        Field(gt=0, le=86_400, description="how long one Unit shall take; a killed Job loses one"),
        REAL,
    ] = 60.0
    backfill: Annotated[
        bool,
        Field(description="on Slurm, where checkpoints holds all: Jobs for the holes of the schedule, beside training"),
    ] = True
    most_jobs: Annotated[
        int, Field(ge=1, le=1000, description="backfill Jobs of this Run in the queue at once"), WHOLE
    ] = 4
    nice: Annotated[
        int,
        Field(ge=0, le=2_147_483_645, description="sbatch's --nice of backfill Jobs: others go before them"),
        WHOLE,
    ] = 10_000
    gate: Annotated[
        list[GateRule],
        Field(
            description="what is done about a Score that is too bad",
            examples=["[{worse_than_best_by: 0.05, action: stop}]"],
        ),
    ] = []

    @property
    def beside_training(self) -> bool:
        """Tell whether Jobs are wanted beside training: only where every checkpoint is to be scored."""
        return self.backfill and "all" in self.checkpoints
