"""Train the model of a Run, from its newest whole checkpoint on."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import Any

from pipeline.config import Config
from pipeline.files import read_json, write_json
from pipeline.lm.batches import Batches
from pipeline.lm.hardware import Hardware, choose_hardware, end_ranks, start_ranks
from pipeline.lm.shards import TokenShards
from pipeline.lm.trainer import Files, Trainer
from pipeline.run import Run
from pipeline.sizes import num_parameters
from pipeline.stages.main import Attempt, Stopped, run_stage


class StopWatch:
    """Know why training should end: a person's stop, the batch shell's warning, or a signal that reached this rank."""

    def __init__(self, run: Run, attempt: Attempt) -> None:
        self.signal: str | None = None
        self.files = {
            run.stop: "control/stop: a person ended the chain",
            run.warned(attempt.job_id, attempt.number): "warned",
        }
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            signal.signal(number, self._take)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number).name

    def reason(self) -> str | None:
        if self.signal is not None:
            return f"asked to stop by {self.signal}"
        for path, reason in self.files.items():
            if path.exists():
                return f"asked to stop by {path.read_text().strip()}" if reason == "warned" else reason
        return None


def pretrain(run: Run, config: Config, attempt: Attempt) -> int:
    """Train to max_steps; return the last step."""
    watch = StopWatch(run, attempt)
    hardware = _settle(run, config)
    start_ranks(hardware)
    try:
        shards = TokenShards(run.data, "train")
        batches = Batches(shards, config.pretrain.sequence_length, config.pretrain.global_batch_size, config.seed)
        trainer = Trainer(
            config, hardware, batches, _files(run, attempt, watch), {"tokenizer": shards.tokenizer_fingerprint}
        )
        outcome = trainer.train()
    finally:
        end_ranks()
    if outcome.stopped is not None:
        raise Stopped(outcome.stopped, outcome.step)
    return outcome.step


def _settle(run: Run, config: Config) -> Hardware:
    """Choose the hardware as this Run did before; rank 0 records it in run.json."""
    record: dict[str, Any] = read_json(run.record) or {}
    hardware = choose_hardware(config, record.get("hardware"))
    if hardware.rank == 0 and record.get("hardware") != hardware.to_json():
        parameters = num_parameters(config.model, config.tokenize.vocab_size)
        write_json(run.record, record | {"parameters": parameters, "hardware": hardware.to_json()})
    return hardware


def _files(run: Run, attempt: Attempt, watch: StopWatch) -> Files:
    def event(kind: str, **details: Any) -> None:
        run.event(kind, stage=attempt.stage, job_id=attempt.job_id, attempt=attempt.number, **details)

    return Files(run.checkpoints, run.metrics, event, watch.reason)


if __name__ == "__main__":
    sys.exit(run_stage("pretrain", pretrain))
