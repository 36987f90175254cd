"""The training loop: a step is a pure function of the state before it and of (seed, step)."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pipeline import sizes
from pipeline.config import Config
from pipeline.errors import DivergedError
from pipeline.files import append_line, read_lines, write_text
from pipeline.lm.batches import Batches
from pipeline.lm.checkpoint import load_newest, remove_old
from pipeline.lm.hardware import Hardware
from pipeline.lm.model import Transformer
from pipeline.lm.optim import build_optimizers, learning_rate_scale, set_learning_rate
from pipeline.lm.saver import Hooks, Saved, Saver


@dataclass(frozen=True)
class Outcome:
    """Where training ended, and why if it was before max_steps."""

    step: int
    stopped: str | None = None


@dataclass(frozen=True)
class Files:
    """Where training writes, and how it hears and tells."""

    checkpoints: Path
    metrics: Path
    event: Callable[..., None]  # event(kind, **details); called on rank 0
    stop_reason: Callable[[], str | None]  # why to end now, or None; asked on every rank before each step


class Trainer:
    """Model, optimizers and data of one Run, on this rank."""

    def __init__(
        self, config: Config, hardware: Hardware, batches: Batches, files: Files, about: dict[str, Any]
    ) -> None:
        self.config, self.hardware, self.batches, self.files, self.about = config, hardware, batches, files, about
        self.model = Transformer(config.model, config.tokenize.vocab_size, config.pretrain.sequence_length)
        self.model.init_weights(config.seed)
        self.model.to(hardware.device)
        self.optimizers = build_optimizers(self.model, config.pretrain)
        self.parallel: nn.Module = self.model
        if hardware.world_size > 1:
            self.parallel = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        self.forward: Callable[..., Tensor] = torch.compile(self.parallel) if hardware.compile else self.parallel
        self.step = self.tokens = 0
        self.saver = Saver(files.checkpoints, about, Hooks(on_saved=self._saved))

    @property
    def is_main(self) -> bool:
        return self.hardware.rank == 0

    def train(self) -> Outcome:
        """Train from the newest whole checkpoint to max_steps, or until asked to stop."""
        with self.saver:  # which leaves when the last save is on disk
            return self._train()

    def _train(self) -> Outcome:
        max_steps = self.config.pretrain.max_steps
        if not self.resume():
            self.save()  # an untrained checkpoint: a disk that cannot be written is found before the first hour
        clock = StepClock()
        while self.step < max_steps:
            self.saver.poll()
            if (reason := self._agreed_stop()) is not None:
                if self.saver.newest != self.step:
                    self.save()
                return Outcome(self.step, reason)
            loss, grad_norm = self.train_step()
            clock.add_step(sizes.tokens_per_step(self.config))
            if self.step % self.config.pretrain.log_interval == 0 or self.step == max_steps:
                self._log(loss, grad_norm, clock)
            if self.step % self.config.pretrain.save_interval == 0 or self.step == max_steps:
                self.save()
                clock.skip()
        return Outcome(self.step)

    def train_step(self) -> tuple[float, float]:
        """Make one optimizer step; return the loss (nats per token, over the global batch) and the gradient's norm."""
        pretrain = self.config.pretrain
        scale = learning_rate_scale(
            self.step, pretrain.max_steps, warmup_steps=pretrain.warmup_steps, schedule=pretrain.schedule,
            decay_fraction=pretrain.decay_fraction, final_ratio=pretrain.min_learning_rate_ratio,
        )  # fmt: skip
        set_learning_rate(self.optimizers, scale)
        loss = self._backward()
        grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), pretrain.grad_clip or math.inf).item()
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise DivergedError(
                f"step {self.step + 1}: loss {loss}, gradient norm {grad_norm}; nothing of it was saved. "
                "Lower pretrain.learning_rate or pretrain.muon_learning_rate, or raise warmup_steps"
            )
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += sizes.tokens_per_step(self.config)
        return loss, grad_norm

    def _backward(self) -> float:
        """Accumulate the gradient of the mean loss over the global batch; return that loss."""
        pretrain, world_size = self.config.pretrain, self.hardware.world_size
        batch = torch.from_numpy(self.batches.batch(self.step, self.hardware.rank, world_size))
        batch = batch.to(self.hardware.device, non_blocking=True)
        micro = pretrain.micro_batch_size or len(batch)
        # DDP takes the mean over ranks, each of which holds 1 / world_size of the tokens.
        share = world_size / sizes.tokens_per_step(self.config)
        total = torch.zeros((), device=self.hardware.device)
        parts = torch.split(batch, micro)
        for number, part in enumerate(parts, start=1):
            if isinstance(self.parallel, DistributedDataParallel):
                self.parallel.require_backward_grad_sync = number == len(parts)
            with self.hardware.autocast():
                loss = self.forward(part[:, :-1], part[:, 1:], reduction="sum") * share
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        if world_size > 1:
            dist.all_reduce(total, dist.ReduceOp.SUM)
            total /= world_size
        return total.item()

    def _agreed_stop(self) -> str | None:
        """Ask every rank, so that all stop at the same step."""
        reason = self.files.stop_reason()
        if self.hardware.world_size == 1:
            return reason
        flag = torch.tensor(0 if reason is None else 1)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return (reason or "another rank was asked to stop") if flag.item() else None

    def _log(self, loss: float, grad_norm: float, clock: StepClock) -> None:
        if self.is_main:
            record: dict[str, Any] = {
                "step": self.step,
                "tokens": self.tokens,
                "loss": loss,
                "lr": self._learning_rate(),
            }
            record |= {"grad_norm": grad_norm, "tokens_per_s": clock.tokens_per_s(), "mfu": None, "time": time.time()}
            append_line(self.files.metrics, record)
        clock.restart()

    def _learning_rate(self) -> float:
        return float(self.optimizers[0].param_groups[0]["lr"])

    def save(self) -> None:
        """Begin to save a checkpoint of this step; it is on disk when the next one begins, at the latest."""
        self.saver.save(self.step, self.model, self.optimizers, {"step": self.step, "tokens": self.tokens})

    def _saved(self, saved: Saved) -> None:
        """Tell of a checkpoint that is on disk, and let old ones go; called on rank 0, in the writer's thread."""
        stall, seconds = round(saved.stall_seconds, 3), round(saved.seconds, 3)
        self.files.event("save", step=saved.step, seconds=seconds, stall_seconds=stall, bytes=saved.bytes)
        pretrain = self.config.pretrain
        remove_old(self.files.checkpoints, pretrain.keep_last, keep_every=pretrain.keep_every)

    def resume(self) -> bool:
        """Load the newest whole checkpoint and cut metrics.jsonl back to it; False if there is none yet."""
        started = time.monotonic()
        loaded = load_newest(self.files.checkpoints, self.model, self.optimizers)
        if loaded is None:
            return False
        self.step, self.tokens = loaded.progress["step"], loaded.progress["tokens"]
        self.saver.newest = self.step
        self.saver.reserve(loaded.bytes // self.hardware.world_size)
        if self.is_main:
            for reason in loaded.refused:
                print(f"refused a checkpoint: {reason}")
                self.files.event("checkpoint refused", reason=reason)
            cut_back(self.files.metrics, self.step)
            self.files.event("resume", step=self.step, seconds=round(time.monotonic() - started, 3))
            print(f"resume from step {self.step} of {self.config.pretrain.max_steps}")
        return True


class StepClock:
    """Measure tokens per second between two log lines, without the time that saves take."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.tokens, self.seconds, self.last = 0, 0.0, time.monotonic()

    def add_step(self, tokens: int) -> None:
        now = time.monotonic()
        self.tokens, self.seconds, self.last = self.tokens + tokens, self.seconds + now - self.last, now

    def skip(self) -> None:
        self.last = time.monotonic()

    def tokens_per_s(self) -> float:
        return round(self.tokens / self.seconds, 1) if self.seconds > 0 else 0.0


def cut_back(metrics: Path, step: int) -> None:
    """Drop the lines of steps that the checkpoint of `step` has not seen: they will be made again."""
    kept = [record for record in read_lines(metrics) if record.get("step", 0) <= step]
    write_text(metrics, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in kept))
