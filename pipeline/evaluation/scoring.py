"""Units: a Benchmark of a checkpoint cut into slices of whole batches, which any Job works off in any order.

    scores/step-00000200/bits_per_byte.d/cut.json      how many batches there are, and how many make a Unit
    scores/step-00000200/bits_per_byte.d/0003.json     the result of one Unit: some numbers for each of its batches
    scores/step-00000200/bits_per_byte.json            the Score, when all Units are there

What is in a batch follows from Config and data alone, and merging puts the numbers of all batches in their order before
it adds them: so a Score is the same to the last bit, however it was cut and whoever came first.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.config.evaluate import BenchmarkSource
from pipeline.config.schema import Config
from pipeline.evaluation.score_kinds import SCORES, Values
from pipeline.files import sha256_file, write_json
from pipeline.run.folder import Run
from pipeline.run.records import Record, number, read_metrics, read_record, read_scores, tokens_per_second, whole
from pipeline.run.steps import MANIFEST

FIRST_UNIT_BATCHES = 16  # where nothing was measured yet


@dataclass(frozen=True)
class Cut:
    """How a Benchmark of one checkpoint is cut. `key` names what was scored and how; results of another are void."""

    key: str
    batches: int
    per_unit: int
    about: Record  # what the Score says beside the numbers: bytes, checkpoint, tokenizer

    @property
    def slices(self) -> list[range]:
        """Return the batches of each Unit."""
        starts = range(0, self.batches, self.per_unit)
        return [range(start, min(start + self.per_unit, self.batches)) for start in starts]


@dataclass(frozen=True)
class Unit:
    """The smallest piece of evaluation: some batches of a Benchmark of a checkpoint."""

    step: int
    benchmark: str
    number: int
    batches: range
    key: str
    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / f"{self.number:04d}.json"

    @property
    def claim(self) -> Path:
        return self.folder / f"{self.number:04d}.claim"

    def result(self) -> Record | None:
        """Return the result; None where it is missing, torn, or of another checkpoint, setting or cut."""
        record = read_record(self.path)
        mine = {"key": self.key, "first": self.batches.start, "end": self.batches.stop}
        return record if mine.items() <= record.items() and isinstance(record.get("values"), dict) else None

    def write(self, values: Values, seconds: float, **about: Any) -> None:
        """Put the result in its place."""
        head = {"benchmark": self.benchmark, "step": self.step, "key": self.key}
        head |= {"first": self.batches.start, "end": self.batches.stop, "seconds": seconds}
        write_json(self.path, head | about | {"values": values})


def key_of(checkpoint: str, tokenizer: str, settings: Record) -> str:
    """Name what is scored and how: the hash of a checkpoint's manifest, the tokenizer's, and what else matters."""
    text = json.dumps([checkpoint, tokenizer, settings], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def manifest_hash(run: Run, step: int) -> str:
    """Return the hash that a checkpoint's manifest carries; empty where there is none."""
    return str(read_record(run.checkpoint(step) / MANIFEST).get("sha256") or "")


def read_cut(run: Run, step: int, benchmark: str) -> Cut | None:
    """Return how a Benchmark of a checkpoint is cut; None before anyone has begun with it."""
    record = read_record(run.slices(step, benchmark) / "cut.json")
    batches, per_unit = whole(record.get("batches")), whole(record.get("per_unit"))
    if not batches or not per_unit or not isinstance(record.get("about"), dict):
        return None
    return Cut(str(record.get("key")), batches, per_unit, record["about"])


def settle_cut(run: Run, step: int, benchmark: str, wanted: Cut) -> Cut:
    """Return the cut that holds: the one that is there, if it is of the same checkpoint and settings, else `wanted`.

    Of several that begin at once the first decides: its file appears by link().
    """
    path = run.slices(step, benchmark) / "cut.json"
    while True:
        found = read_cut(run, step, benchmark)
        if found is not None and found.key == wanted.key:
            return found
        draft = path.with_name(f".cut.{secrets.token_hex(4)}.{os.getpid()}.tmp")
        write_json(draft, asdict(wanted))
        if found is not None or path.exists():  # of other weights under the same step, or torn
            draft.replace(path)
            continue
        try:
            os.link(draft, path)
        except FileExistsError:
            pass
        finally:
            draft.unlink(missing_ok=True)


def units_of(run: Run, step: int, benchmark: str, cut: Cut) -> list[Unit]:
    """Return all Units of a Benchmark of a checkpoint."""
    folder = run.slices(step, benchmark)
    return [Unit(step, benchmark, at, batches, cut.key, folder) for at, batches in enumerate(cut.slices)]


def merge(run: Run, step: int, benchmark: str, kind: str, cut: Cut) -> Record | None:
    """Return the Score from the results of all Units; None while one is missing. Nothing is written."""
    values: Values = {}
    seconds, results = 0.0, []
    for unit in units_of(run, step, benchmark, cut):
        if (result := unit.result()) is None:
            return None
        results.append(result)
        seconds += number(result.get("seconds")) or 0.0
        for name, numbers in result["values"].items():
            values.setdefault(name, []).extend(numbers)
    record = {"benchmark": benchmark, "step": step} | SCORES[kind](values, cut.about) | cut.about
    return record | {"key": cut.key, "units": len(results), "batches": cut.batches, "seconds": seconds}


def is_scored(run: Run, step: int, benchmark: str | BenchmarkSource) -> bool:
    """Tell whether the Score is there, and of the weights, tokenizer and questions that are there now.

    By name alone the questions are not looked at. What a Score does not say, and what is gone, is taken to be the same.
    """
    source = benchmark if isinstance(benchmark, BenchmarkSource) else None
    record = read_record(run.score(step, source.name if source else str(benchmark)))
    if number(record.get("score")) is None:
        return False
    tokenizer = read_record(run.index).get("tokenizer")
    known = [
        (record.get("checkpoint_sha256"), manifest_hash(run, step)),
        (record.get("tokenizer"), tokenizer.get("fingerprint") if isinstance(tokenizer, dict) else None),
    ]
    if source is not None:
        known += [(record.get(key), value) for key, value in describe_source(source).items()]
    return not any(then and now and then != now for then, now in known)


def describe_source(benchmark: BenchmarkSource) -> Record:
    """Return what a Score keeps of its Benchmark's kind and of the file of its questions, as they are now."""
    described: Record = {"kind": benchmark.kind}
    path = Path(benchmark.path) if benchmark.path else None
    if path is not None and benchmark.kind != "lm_eval" and path.is_file():
        status = path.stat()
        described["questions_sha256"] = _hash_of(path, status.st_size, status.st_mtime_ns)
    return described


@cache
def _hash_of(path: Path, size: int, changed: int) -> str:
    return sha256_file(path)


# What a Unit will take


def seconds_per_batch(run: Run, config: Config, benchmark: str) -> float | None:
    """Return how long one batch takes: as measured in this Run, else by the speed of training, else None."""
    records = [score.details for score in read_scores(run) if score.benchmark == benchmark]
    records += [read_record(path) for path in _results(run, benchmark)] if not records else []
    speeds = []
    for record in records:
        batches = whole(record.get("batches")) or (whole(record.get("end")) or 0) - (whole(record.get("first")) or 0)
        seconds = number(record.get("seconds"))
        if seconds and batches:
            speeds.append(seconds / batches)
    if speeds:
        return sorted(speeds)[len(speeds) // 2]
    if speed := tokens_per_second(read_metrics(run)):
        ranks = config.pretrain.nodes * config.pretrain.nproc_per_node
        forward = 3 * speed / ranks  # a forward pass is a third of a training step
        return config.evaluate.batch_size * config.pretrain.sequence_length / forward
    return None


def _results(run: Run, benchmark: str) -> list[Path]:
    return sorted(run.scores(0).parent.glob(f"step-*/{benchmark}.d/[0-9]*.json"))


def batches_per_unit(config: Config, batches: int, per_batch: float | None) -> int:
    """Return how many batches make a Unit of about evaluate.unit_seconds."""
    wanted = FIRST_UNIT_BATCHES if not per_batch else round(config.evaluate.unit_seconds / per_batch)
    return max(1, min(wanted, batches))


# What is left


@dataclass(frozen=True)
class Left:
    """What is still to be scored: the open Units, and the Benchmarks of checkpoints that nobody has begun with."""

    units: list[Unit]
    uncut: list[tuple[int, str]]
    seconds: float  # an estimate

    def __bool__(self) -> bool:
        return bool(self.units or self.uncut)


def what_is_left(run: Run, config: Config, steps: list[int]) -> Left:
    """List what of the Benchmarks of `steps` is not scored; of a cut that no longer fits, all."""
    units: list[Unit] = []
    uncut: list[tuple[int, str]] = []
    seconds = 0.0
    speed: Callable[[str], float] = lambda name: seconds_per_batch(run, config, name) or 0.0  # noqa: E731
    speeds = {benchmark.name: speed(benchmark.name) for benchmark in config.evaluate.benchmarks}
    for step in steps:
        for benchmark in config.evaluate.benchmarks:
            if is_scored(run, step, benchmark):
                continue
            cut = read_cut(run, step, benchmark.name)
            if cut is None or cut.about.get("checkpoint_sha256") != manifest_hash(run, step):
                uncut.append((step, benchmark.name))
                batches = windows_batches(run, config) if benchmark.kind == "bits_per_byte" else 0
                seconds += batches * speeds[benchmark.name] or config.evaluate.unit_seconds
                continue
            found = [unit for unit in units_of(run, step, benchmark.name, cut) if unit.result() is None]
            units += found
            seconds += sum(len(unit.batches) for unit in found) * speeds[benchmark.name]
    return Left(units, uncut, seconds)


def windows_batches(run: Run, config: Config) -> int:
    """Return how many batches the validation text makes, from the index alone; 0 where it is not known."""
    splits = read_record(run.index).get("splits")
    validation = splits.get("validation") if isinstance(splits, dict) else None
    tokens = whole(validation.get("tokens")) if isinstance(validation, dict) else None
    size = config.pretrain.sequence_length
    stride = config.evaluate.stride or size // 2
    windows = 1 + max(0, -(-((tokens or 0) - size) // stride))
    return -(-windows // config.evaluate.batch_size) if tokens else 0
