"""A step is a function of the state before it and of (seed, step): cutting and resuming change nothing."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from pipeline.config.schema import Config
from pipeline.errors import DivergedError
from pipeline.files import read_lines
from pipeline.lm.hardware import Hardware
from pipeline.lm.ledger import Ledger
from pipeline.lm.trainer import Files, Trainer, cut_back
from pipeline.plan import sizes
from pipeline.run.steps import list_steps

CPU = Hardware(device="cpu", precision="fp32", compile=False, threads=1)


class FakeBatches:
    """Batches of a text that repeats, so that there is something to learn."""

    document_end = 5

    def __init__(self, size: int = 4, length: int = 16) -> None:
        self.size, self.length = size, length

    def batch(self, step: int, rank: int, world_size: int) -> np.ndarray:
        rows = np.random.default_rng(step).integers(0, 20, (self.size, 1))
        whole = (rows + np.arange(self.length + 1) * 3) % 50
        share = self.size // world_size
        return whole[rank * share : (rank + 1) * share]


def config(**pretrain: Any) -> Config:
    keys = {"max_steps": 12, "global_batch_size": 4, "sequence_length": 16, "warmup_steps": 2}
    keys |= {"save_interval": 4, "log_interval": 1, "keep_last": 10}
    return Config.model_validate(
        {
            "name": "x",
            "tokenize": {"vocab_size": 300},
            "model": {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
            "pretrain": keys | pretrain,
        }
    )


class StopAt:
    """Ask for a stop when `step` steps have been polled."""

    def __init__(self, step: int | None) -> None:
        self.left = step

    def __call__(self) -> str | None:
        if self.left is None:
            return None
        self.left -= 1
        return "told to" if self.left < 0 else None


def trainer(folder: Path, wanted: Config, stop_after: int | None = None, **hooks: Any) -> Trainer:
    folder.mkdir(exist_ok=True)
    hooks = {"event": lambda kind, **details: None, "stop_reason": StopAt(stop_after)} | hooks
    files = Files(folder / "checkpoints", folder / "metrics.jsonl", **hooks)
    torch.set_num_threads(1)
    return Trainer(wanted, CPU, FakeBatches(), files, {})


def curve(folder: Path) -> list[tuple[int, float, float, float]]:
    return [(r["step"], r["loss"], r["lr"], r["grad_norm"]) for r in read_lines(folder / "metrics.jsonl")]


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_three_resumes_are_bitwise_an_uninterrupted_run(tmp_path: Path, optimizer: str) -> None:
    twin = trainer(tmp_path / "twin", config(optimizer=optimizer))
    assert twin.train().step == 12
    for stop_after in (3, 2, 4):
        outcome = trainer(tmp_path / "run", config(optimizer=optimizer), stop_after).train()
        assert outcome.stopped == "told to"
    last = trainer(tmp_path / "run", config(optimizer=optimizer))
    assert last.train().stopped is None
    assert curve(tmp_path / "run") == curve(tmp_path / "twin")
    for a, b in zip(twin.stepper.model.parameters(), last.stepper.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_training_begins_with_the_weights_of_a_folder_and_then_goes_on_from_checkpoints(tmp_path: Path) -> None:
    first = trainer(tmp_path / "first", config())
    first.train()
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(first.stepper.model.state_dict(), folder / "model.safetensors")
    wanted = config(init_from=str(folder), max_steps=6)
    begun = trainer(tmp_path / "run", wanted, stop_after=0)
    begun.train()
    for a, b in zip(first.stepper.model.parameters(), begun.stepper.model.parameters(), strict=True):
        assert torch.equal(a, b)
    (folder / "model.safetensors").unlink()  # what has begun needs it no more
    assert trainer(tmp_path / "run", wanted).train().step == 6


def test_a_stop_saves_the_step_it_has_reached(tmp_path: Path) -> None:
    outcome = trainer(tmp_path, config(), stop_after=6).train()
    assert outcome.step == 6
    assert list_steps(tmp_path / "checkpoints") == [0, 4, 6]


def test_a_stop_before_the_first_step_is_clean(tmp_path: Path) -> None:
    assert trainer(tmp_path, config(), stop_after=0).train().step == 0
    assert list_steps(tmp_path / "checkpoints") == [0]


def test_the_result_does_not_depend_on_how_a_batch_is_cut(tmp_path: Path) -> None:
    whole, cut = trainer(tmp_path / "a", config()), trainer(tmp_path / "b", config(micro_batch_size=1))
    for _ in range(3):
        assert whole.stepper.make_step()[0] == pytest.approx(cut.stepper.make_step()[0], rel=1e-5)


def test_documents_are_kept_separate_when_the_config_says_so(tmp_path: Path) -> None:
    packed, separate = (
        trainer(tmp_path / name, config(document_attention=name)).stepper for name in ("packed", "separate")
    )
    assert (packed.model.model.document_end, separate.model.model.document_end) == (None, 5)
    assert packed.make_step()[0] != separate.make_step()[0]


def test_loss_falls(tmp_path: Path) -> None:
    trainer(tmp_path, config(max_steps=60, warmup_steps=5, save_interval=100)).train()
    losses = [loss for _, loss, _, _ in curve(tmp_path)]
    assert losses[0] == pytest.approx(math.log(300), rel=0.05)
    assert losses[-1] < losses[0] - 1


def test_a_loss_that_is_not_finite_is_never_saved(tmp_path: Path) -> None:
    run = trainer(tmp_path, config())
    run.save()
    run.saver.wait()
    with torch.no_grad():
        run.stepper.model.model.norm.weight[0] = math.nan
    with pytest.raises(DivergedError, match="step 1: loss nan"):
        run.stepper.make_step()
    assert list_steps(tmp_path / "checkpoints") == [0]


def test_more_steps_go_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    trainer(tmp_path, config()).train()
    longer = trainer(tmp_path, config(max_steps=16))
    assert longer.train().step == 16
    assert [step for step, *_ in curve(tmp_path)] == list(range(1, 17))


def test_steps_count_as_kept_once_their_checkpoint_is_on_disk(tmp_path: Path) -> None:
    """A save that is killed half way leaves the steps since the one before to be repeated."""
    gate, during = threading.Event(), []
    ledger = Ledger(time.time(), lambda account: None)

    def fence() -> None:
        if threading.current_thread() is not threading.main_thread() and run.saver.newest == 4:
            gate.wait(60)

    def stop_reason() -> str | None:
        if run.step == 6:  # step 4 is being saved
            during.extend(step for step, *_ in ledger.marks)
            gate.set()
        return "told to" if run.step == 7 else None

    run = trainer(tmp_path, config(), ledger=ledger, fence=fence, stop_reason=stop_reason)
    run.train()
    assert during == [0]
    assert [step for step, *_ in ledger.marks] == [0, 4, 7]
    assert ledger.first == 0


class Record:
    """A sink that remembers."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, int]] = []

    def write(self, step: int, values: dict[str, float]) -> None:
        assert values["loss"] > 0
        self.lines.append(("write", step))

    def rewind(self, step: int) -> None:
        self.lines.append(("rewind", step))

    def close(self) -> None: ...


def test_a_log_line_tells_where_the_time_went_and_goes_to_the_sinks_too(tmp_path: Path) -> None:
    sink = Record()
    trainer(tmp_path, config(peak_tflops=1e-3), stop_after=4, sinks=[sink]).train()
    trainer(tmp_path, config(peak_tflops=1e-3, max_steps=5), sinks=[sink]).train()
    assert sink.lines == [*(("write", step) for step in (1, 2, 3, 4)), ("rewind", 4), ("write", 5)]
    for line in read_lines(tmp_path / "metrics.jsonl"):
        seconds = 64 / line["tokens_per_s"]  # 64 tokens a step
        split = [line[f"{kind}_s"] for kind in ("data", "forward_backward", "optimizer")]
        assert all(part >= 0 for part in split)
        assert 0 < sum(split) <= seconds * 1.01
        flops = sizes.flops_per_token(config().model, 300, 16)
        assert line["mfu"] == pytest.approx(line["tokens_per_s"] * flops / 1e9, rel=0.01)
        assert line["peak_memory"] > 1e7
        assert line["save_s"] >= 0


def test_metrics_are_cut_back_to_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"ste')
    cut_back(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
