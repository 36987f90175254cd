"""Score checkpoints of a Run, Unit by Unit, in the time that there is; beside other Jobs that do the same."""

from __future__ import annotations

from pipeline.stages import early  # noqa: F401 - first: signals are taken while torch is imported

# isort: split
import sys
import time
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.config.evaluate import PYTHON_DOCS, BenchmarkSource
from pipeline.config.schema import Config
from pipeline.errors import NotReadyError, UserError
from pipeline.evaluation.claims import Claimant, release
from pipeline.evaluation.compressors import bits_per_byte
from pipeline.evaluation.gate import apply_gate
from pipeline.evaluation.python_docs import questions as python_docs
from pipeline.evaluation.questions import Question, read_questions
from pipeline.evaluation.score_table import write_table
from pipeline.evaluation.scoring import (
    Cut,
    Unit,
    batches_per_unit,
    describe_source,
    is_scored,
    key_of,
    manifest_hash,
    merge,
    seconds_per_batch,
    settle_cut,
    units_of,
)
from pipeline.files import write_json
from pipeline.lm.batches import ValidationText, validation_text
from pipeline.lm.checkpoint import load_weights
from pipeline.lm.evaluation import Task, TextTask
from pipeline.lm.hardware import Hardware, start_hardware
from pipeline.lm.harness import HarnessTask
from pipeline.lm.model import Transformer
from pipeline.lm.origin import check_tokenizer
from pipeline.lm.questions import QuestionTask
from pipeline.lm.shards import TokenShards
from pipeline.lm.tokenizer import Tokenizer
from pipeline.lm.verified import verify_shards
from pipeline.run.complete import steps_to_evaluate
from pipeline.run.folder import Run
from pipeline.run.records import BeginRecord, read_record
from pipeline.run.steps import Lease, reading
from pipeline.stages.main import Attempt, poll, run_stage

LEAVE_SECONDS = 15.0  # before the end of the Job: to merge, to leave a verdict, to hand on what is left
CAUTION = 1.2  # a Unit may take that much longer than those before it


def evaluate(run: Run, config: Config, attempt: Attempt) -> int:
    """Write what is missing of scores/ as far as the time allows; return the newest step that is asked for.

    While it works, newer checkpoints may come and be the ones that are asked for: these are scored too.
    """
    if not steps_to_evaluate(run, config):
        raise NotReadyError(f"{run.checkpoints}: no checkpoint to evaluate yet; pretrain writes the first one")
    evaluation = Evaluation(run, config, attempt)
    evaluation.score_compressors()
    done: dict[int, bool] = {}  # whether it was there to be scored
    while steps := [step for step in steps_to_evaluate(run, config) if step not in done]:
        for step in steps:
            with reading(run.checkpoint(step)) as lease:
                scored = evaluation.score_all(step, lease)
            if scored is None:
                print(f"leaves in time: {evaluation.seconds_left():.0f} s are left, too few for another Unit")
                return steps[-1]
            done[step] = scored
    if not any(done.values()):
        raise NotReadyError(f"{run.checkpoints}: all checkpoints that were to be scored went away before that")
    return max(done)


class Evaluation:
    """What one attempt needs to score Units, each part made when it is first needed."""

    def __init__(self, run: Run, config: Config, attempt: Attempt) -> None:
        self.run, self.config, self.attempt = run, config, attempt
        begin = BeginRecord.read(run.beginning(attempt.job_id, attempt.number))
        dead = begin.dead if begin else None
        self.claimant = Claimant(attempt.job_id, attempt.number, frozenset(dead) if dead is not None else None)
        self.deadline = begin.deadline if begin else None  # unix s; None: no end is known
        self._tasks: dict[str, Task] = {}
        self._speeds: dict[str, float | None] = {}
        self._loaded: tuple[int, Transformer] | None = None

    @cached_property
    def hardware(self) -> Hardware:
        return start_hardware(self.config, self.run.record)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer(self.run.tokenizer)

    @cached_property
    def text(self) -> ValidationText:
        shards = TokenShards(self.run.data, "validation")
        verify_shards(shards)
        return validation_text(shards, self.tokenizer)

    def score_compressors(self) -> None:
        """Write what general compressors need for the validation text, once."""
        if not read_record(self.run.compressors):
            record = {"bytes": len(self.text.text), "bits_per_byte": bits_per_byte(self.text.text)}
            write_json(self.run.compressors, record)

    def score_all(self, step: int, lease: Lease) -> bool | None:
        """Score all Benchmarks of a checkpoint; False where retention was faster, None where the time is up."""
        for benchmark in self.config.evaluate.benchmarks:
            if is_scored(self.run, step, benchmark):
                print(f"step {step}: {benchmark.name} is scored already")
                continue
            try:
                if not self.score(step, benchmark, lease):
                    return None
            except NotReadyError as error:
                if self.run.checkpoint(step).is_dir():
                    raise
                print(f"step {step}: {error}")
                self.run.event("not scored", step=step, benchmark=benchmark.name, reason=str(error))
                return False
        return True

    def score(self, step: int, benchmark: BenchmarkSource, lease: Lease) -> bool:
        """Work off the Units of one Benchmark of one checkpoint; return False where the time is up before its end."""
        name = benchmark.name
        checkpoint = manifest_hash(self.run, step)
        task, tokenizer = self._task(benchmark), self.tokenizer.fingerprint
        about = {"checkpoint": self.run.checkpoint(step).name, "checkpoint_sha256": checkpoint, "tokenizer": tokenizer}
        about |= describe_source(benchmark)
        key = key_of(checkpoint, tokenizer, {"kind": benchmark.kind} | task.settings)
        per_unit = batches_per_unit(self.config, task.batches, self._seconds_per_batch(name))
        wanted = Cut(key, task.batches, per_unit, about | task.about)
        cut = settle_cut(self.run, step, name, wanted)
        for unit in units_of(self.run, step, name, cut):
            if unit.result() is not None:
                continue
            if unit.path.exists():
                print(f"{unit.path}: torn, or of other weights or settings; it is made again")
            if not self._fits(unit):
                return False
            lease.renew()
            self._work_off(unit, task)
        self._merge(step, benchmark, cut)
        return True

    def seconds_left(self) -> float:
        """Return the seconds until this attempt has to leave."""
        return float("inf") if self.deadline is None else self.deadline - time.time() - LEAVE_SECONDS

    def _fits(self, unit: Unit) -> bool:
        per_batch = self._seconds_per_batch(unit.benchmark)
        expected = len(unit.batches) * per_batch if per_batch else self.config.evaluate.unit_seconds
        return CAUTION * expected < self.seconds_left()

    def _seconds_per_batch(self, benchmark: str) -> float | None:
        if benchmark not in self._speeds:
            self._speeds[benchmark] = seconds_per_batch(self.run, self.config, benchmark)
        return self._speeds[benchmark]

    def _work_off(self, unit: Unit, task: Task) -> None:
        """Score a Unit, unless someone else is at it."""
        if not self.claimant.claim(unit.claim):
            return
        if unit.result() is not None:  # it was finished, and its claim taken away, since we looked
            release(unit.claim)
            return
        try:
            model = self._model(unit.step)
            started = time.monotonic()
            values = task.score(model, self.hardware, unit.batches, lambda: poll(self.run, self.attempt))
            seconds = time.monotonic() - started
            unit.write(values, seconds, job_id=self.attempt.job_id, attempt=self.attempt.number, time=time.time())
        except BaseException:
            self.claimant.give_back(unit.claim)
            raise
        release(unit.claim)
        self._speeds[unit.benchmark] = seconds / len(unit.batches)

    def _merge(self, step: int, benchmark: BenchmarkSource, cut: Cut) -> None:
        """Write the Score where all Units are there, and look whether it sets something off."""
        record = merge(self.run, step, benchmark.name, benchmark.kind, cut)
        if record is None:
            print(f"step {step}: other Jobs work on the rest of {benchmark.name}")
            return
        write_json(self.run.score(step, benchmark.name), record)
        error = f" ± {record['error']:.4f}" if record.get("error") else ""
        print(
            f"step {step}: {benchmark.name} {record['score']:.4f}{error} {record['unit']} in {record['seconds']:.1f} s"
        )
        write_table(self.run)
        apply_gate(self.run, self.config, step, benchmark.name)

    def _model(self, step: int) -> Transformer:
        """Return the model of a step; the last one is kept."""
        if self._loaded is None or self._loaded[0] != step:
            config = self.config
            separate = config.pretrain.document_attention == "separate"
            model = Transformer(
                config.model, config.tokenize.vocab_size, config.pretrain.sequence_length,
                document_end=self.tokenizer.eos_id if separate else None,
            )  # fmt: skip
            checkpoint = self.run.checkpoint(step)
            check_tokenizer(checkpoint, load_weights(checkpoint, model), self.tokenizer.fingerprint)
            self._loaded = step, model.to(self.hardware.device).eval()
        return self._loaded[1]

    def _task(self, benchmark: BenchmarkSource) -> Task:
        """Return a Benchmark made ready; it is the same for all checkpoints."""
        if benchmark.name not in self._tasks:
            self._tasks[benchmark.name] = self._make_task(benchmark)
        return self._tasks[benchmark.name]

    def _make_task(self, benchmark: BenchmarkSource) -> Task:
        size, batch_size = self.config.pretrain.sequence_length, self.config.evaluate.batch_size
        if benchmark.kind == "bits_per_byte":
            return TextTask(
                self.text, bos=self.tokenizer.eos_id, size=size,
                stride=self.config.evaluate.stride or size // 2, batch_size=batch_size,
            )  # fmt: skip
        if benchmark.kind == "lm_eval":
            path = Path(benchmark.path) if benchmark.path else None
            return HarnessTask(benchmark.name, path, self.tokenizer, size=size, batch_size=batch_size)
        return QuestionTask(_questions(benchmark), benchmark.kind, self.tokenizer, size=size, batch_size=batch_size)


def _questions(benchmark: BenchmarkSource) -> list[Question]:
    """Read a Benchmark's questions, or make those about Python."""
    if benchmark.path != PYTHON_DOCS:
        return read_questions(Path(str(benchmark.path)), benchmark.kind)
    try:
        made: list[dict[str, Any]] = python_docs()
    except ImportError as error:
        raise UserError(
            f"evaluate.benchmarks: {PYTHON_DOCS}: this Python has no documentation ({error}); name other Benchmarks"
        ) from error
    if benchmark.kind == "cloze":
        return [Question(record["context"], (record["choices"][record["answer"]],), 0) for record in made]
    return [Question(record["context"], tuple(record["choices"]), record["answer"]) for record in made]


if __name__ == "__main__":
    sys.exit(run_stage("evaluate", evaluate, owns=False))
