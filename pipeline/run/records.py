"""What a Run has written about itself, read with patience: torn, missing and foreign records are left out."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline.config.load import load_run_config
from pipeline.config.schema import Config
from pipeline.errors import UserError
from pipeline.files import read_json, read_lines, write_json
from pipeline.run.folder import Run
from pipeline.run.steps import STEP_FOLDER

Record = dict[str, Any]

SPEED_LINES = 10  # that tokens/s is the median of: one slow line must not move the time left


class FileRecord(BaseModel):
    """One JSON file of a Run. Keys of another version are left out; a torn, missing or foreign file reads as None."""

    model_config = ConfigDict(extra="ignore", frozen=True, defer_build=True)

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Return what a file holds, or None."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):
            return None

    def write(self, path: Path, *, durable: bool = True) -> None:
        """Write the file by rename, without what is not known."""
        write_json(path, self.model_dump(mode="json", exclude_none=True), durable=durable)

    def but(self, **changes: Any) -> Self:
        """Return the record with some fields changed."""
        return self.model_copy(update=changes)


class JobRecord(FileRecord):
    """One Job at Slurm: an entry of the Run's Job ledger, `jobs/NNNNNN.json`.

    A Job is ours by job id, token (its comment) and user together: a controller that has lost its state gives the same
    ids again, to anybody.
    """

    number: int = 0
    stage: str
    phase: str = ""  # of tokenize, where it is cut into several Jobs
    # beside: evaluates checkpoints while training goes on; alone: a person asked for this Stage, of what is there now
    role: Literal["chain", "beside", "alone"] = "chain"
    segment: int = 0  # 1, 2, … where Segments are queued beforehand
    tasks: int = 1  # of a Job array
    token: str = ""
    name: str = ""  # what squeue shows as its name
    user: str = ""  # who submitted it
    job_id: str | None = None  # None until sbatch has answered
    dependency: str = ""
    submitted: float = 0.0  # unix s
    by: str = ""  # the attempt that submitted it, JOB.N; empty: a person's command
    since: float = 0.0  # when a person last started the chain: attempts that ended before do not count against it
    signal_lead: int | None = None  # seconds before its limit at which it is warned
    minutes: int | None = None  # its time limit, of a Job beside training
    why: str = ""
    closed: bool = False  # it is known to have ended, so Slurm need not be asked

    @property
    def kind(self) -> str:
        """Return what it does: its phase, or its Stage."""
        return self.phase or self.stage


class BeginRecord(FileRecord):
    """What the host knew when an attempt began: `attempts/JOB.N/begin.json`."""

    job_id: str = ""
    number: int = 0
    stage: str
    part: str = ""  # of the Stage's work: phase, and the task of a Job array: encode/3/8
    nodes: list[str] = []
    step_at_start: int = -1  # newest checkpoint's; -1 where there is none
    time: float = 0.0  # unix s
    deadline: float | None = None  # unix s at which Slurm ends the Job, by the limit that it really gave
    signal_lead: int | None = None  # seconds before the deadline at which the warning comes, about
    dead: list[str] | None = None  # attempts (JOB.N) whose claims of Units may be taken over
    environment: str = ""  # digest of interpreter and image: a fault seen with the same one elsewhere is no node's


class SaidRecord(FileRecord):
    """What a rank said of the end of its attempt: `attempts/JOB.N/said.json`."""

    verdict: str
    reason: str = ""
    step: int | None = None
    stage: str | None = None
    nodes: list[str] = []  # that it found unfit
    sure: bool | None = None  # others of the attempt were looked at, and fine
    began: float | None = None  # when the job script started, unix s
    time: float = 0.0  # unix s
    host: str = ""
    pid: int | None = None


class VerdictRecord(FileRecord):
    """How an attempt ended, by its host or the one that took over: `attempts/JOB.N/verdict.json`."""

    verdict: str
    reason: str = ""
    step: int | None = None
    stage: str | None = None
    cause: str = ""  # the same for what is the same fault, whatever nodes, numbers and times its reason names
    nodes: list[str] = []  # that are to blame
    sure: bool = False  # other nodes of the attempt were looked at, and fine: the blame stands
    step_at_start: int | None = None
    step_at_end: int | None = None
    warned: str | None = None
    units: int | None = None  # of evaluate, that this attempt finished
    began: float | None = None
    time: float = 0.0
    host: str = ""


@dataclass(frozen=True)
class Score:
    """One number of one Benchmark for one checkpoint."""

    step: int
    benchmark: str
    score: float
    unit: str
    details: Record

    def to_json(self) -> Record:
        return {key: value for key, value in asdict(self).items() if key != "details"}


@dataclass(frozen=True)
class Sample:
    """One prompt and what the model of one step made of it."""

    step: int
    prompt: str
    completion: str
    finish_reason: str
    tokens: int | None


def number(value: Any) -> float | None:
    """Return `value` if it is a finite number, else None (also for true and false)."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return value
    return None


def whole(value: Any) -> int | None:
    """Return `value` if it is a whole number, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def read_record(path: Path) -> Record:
    """Return a JSON file's object; an empty one if the file is missing, torn or something else."""
    try:
        value = read_json(path)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def read_records(path: Path) -> list[Record]:
    """Return the whole lines of a file of JSON lines; none if it cannot be read."""
    try:
        return read_lines(path)
    except OSError:
        return []


def read_config(run: Run) -> Config | None:
    """Return the Run's Config; None where this version of the code cannot read it."""
    try:
        return load_run_config(run.config)
    except (UserError, OSError):
        return None


def read_metrics(run: Run) -> list[Record]:
    """Return the lines of metrics.jsonl that count, by step.

    A step that comes again, or one lower than the last, means that training went on from an older checkpoint: what
    lay beyond it is no part of the model.
    """
    rows: list[Record] = []
    for row in read_records(run.metrics):
        if (step := whole(row.get("step"))) is None:
            continue
        while rows and rows[-1]["step"] >= step:
            rows.pop()
        rows.append(row)
    return rows


def read_scores(run: Run) -> list[Score]:
    """Return all Scores, by step and Benchmark."""
    scores = []
    for path in sorted(run.scores(0).parent.glob("step-*/*.json")):
        record = read_record(path)
        if (folder := STEP_FOLDER.fullmatch(path.parent.name)) and (score := number(record.get("score"))) is not None:
            name, unit = str(record.get("benchmark", path.stem)), str(record.get("unit", ""))
            scores.append(Score(int(folder[1]), name, score, unit, record))
    return scores


def read_compressors(run: Run) -> dict[str, float]:
    """Return the bits per byte of each compressor on the validation text."""
    values = read_record(run.compressors).get("bits_per_byte")
    if not isinstance(values, dict):
        return {}
    return {str(name): value for name, value in values.items() if number(value) is not None}


def read_samples(run: Run) -> list[Sample]:
    """Return all samples, by step, in the order of the prompts."""
    samples = []
    for path in sorted(run.samples(0).parent.glob("step-*.jsonl")):
        if name := STEP_FOLDER.fullmatch(path.stem):
            samples += [
                Sample(
                    int(name[1]),
                    str(record.get("prompt", "")),
                    str(record.get("completion", "")),
                    str(record.get("finish_reason", "")),
                    whole(record.get("tokens")),
                )
                for record in read_records(path)
            ]
    return samples


def tokens_per_second(metrics: list[Record]) -> float | None:
    """Return the median speed of the last log lines."""
    recent = metrics[-SPEED_LINES:]
    speeds = sorted(speed for row in recent if (speed := number(row.get("tokens_per_s"))) is not None)
    return speeds[len(speeds) // 2] if speeds else None


def seconds_in_steps(metrics: list[Record]) -> float:
    """Return how long the steps that count took: the tokens of each log line over its tokens/s."""
    seconds, before = 0.0, 0.0
    for row in metrics:
        tokens, speed = number(row.get("tokens")), number(row.get("tokens_per_s"))
        if tokens is not None and speed:
            seconds += max(0.0, tokens - before) / speed
            before = tokens
    return seconds


def text_of(path: Path) -> str:
    """Return a file's text, or nothing where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def json_line(text: str) -> Record | None:
    """Return the object of one JSON line; None for anything else."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
