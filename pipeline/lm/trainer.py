"""The training loop: a step is a pure function of the state before it and of (seed, step)."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
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
from pipeline.lm.divergence import SpikeDetector
from pipeline.lm.hardware import Hardware
from pipeline.lm.inject import Injector
from pipeline.lm.ledger import Ledger, Mark
from pipeline.lm.model import Transformer
from pipeline.lm.optim import build_optimizers, learning_rate_scale, set_learning_rate
from pipeline.lm.saver import LIMIT, Hooks, Saved, Saver
from pipeline.lm.stragglers import OwnTime, Stragglers
from pipeline.lm.watchdog import Watchdog

COUNTERS = ("step", "tokens", "batch_offset", "rollbacks")


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
    save_wanted: Callable[[], bool] = lambda: False  # asked on rank 0 before each step
    save_done: Callable[[], None] = lambda: None  # called on rank 0 when what was wanted is on disk
    fence: Callable[[], None] = lambda: None  # raises where another process has taken this Run over
    ledger: Ledger = field(default_factory=lambda: Ledger(time.time(), lambda account: None))
    watchdog: Watchdog | None = None


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
        self.step = self.tokens = self.batch_offset = self.rollbacks = 0
        self.saver = Saver(files.checkpoints, about, Hooks(before_publish=files.fence, on_saved=self._saved))
        self.spikes = SpikeDetector(config.pretrain.spike_threshold, config.pretrain.spike_window)
        self.injector = Injector(hardware.rank, files.event)
        self.own_time = OwnTime(hardware.device)
        self.stragglers = Stragglers(config.pretrain.straggler_threshold)
        if hardware.world_size > 1:
            self.own_time.watch(self.model)
        self._stepped = False
        self._mark: Mark = (0, 0.0, 0.0)  # of the save in flight

    @property
    def is_main(self) -> bool:
        return self.hardware.rank == 0

    def train(self) -> Outcome:
        """Train from the newest whole checkpoint to max_steps, or until asked to stop."""
        with self.saver:  # which leaves when the last save is on disk
            outcome = self._train()
            if self.files.watchdog:
                self.files.watchdog.expect(f"the save of step {outcome.step}", LIMIT)
            with self.files.ledger.during("save"):
                self.saver.wait()
        return outcome

    def _train(self) -> Outcome:
        with self.files.ledger.during("load"):
            resumed = self.resume()
        if resumed:
            self.files.ledger.mark(self.files.ledger.here(self.step))
        else:
            self._checkpoint()  # an untrained one: a disk that cannot be written is found before the first hour
        clock = StepClock()
        while self.step < self.config.pretrain.max_steps:
            self.saver.poll()
            stop, save = self._agree()
            if stop is not None or save:
                self._save_on_request(clock)
            if stop is not None:
                return Outcome(self.step, stop)
            try:
                self._advance(clock)
            except DivergedError as error:
                self._roll_back(error, self.step)
        return Outcome(self.step)

    def _advance(self, clock: StepClock) -> None:
        """Make one step; log and save where it is time to."""
        pretrain = self.config.pretrain
        loss, grad_norm = self.train_step()
        clock.add_step(sizes.tokens_per_step(self.config))
        if self.files.watchdog:
            self.files.watchdog.beat(self.step)
        if self._is_spike(loss):
            return
        if self.step % pretrain.log_interval == 0 or self.step == pretrain.max_steps:
            self._log(loss, grad_norm, clock)
        if self.step % pretrain.save_interval == 0 or self.step == pretrain.max_steps:
            self._checkpoint()
            clock.skip()
        if self.is_main:
            self.files.ledger.write()

    def train_step(self) -> tuple[float, float]:
        """Make one optimizer step; return the loss (nats per token, over the global batch) and the gradient's norm.

        Raises DivergedError on all ranks alike, with the model unchanged, where one of the two is not finite on any.
        """
        pretrain = self.config.pretrain
        scale = learning_rate_scale(
            self.step, pretrain.max_steps, warmup_steps=pretrain.warmup_steps, schedule=pretrain.schedule,
            decay_fraction=pretrain.decay_fraction, final_ratio=pretrain.min_learning_rate_ratio,
        )  # fmt: skip
        set_learning_rate(self.optimizers, scale)
        share = self._backward()
        self.injector.gradients(self.step + self.batch_offset + 1, self.model)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), pretrain.grad_clip or math.inf)
        loss, diverged = self._agreed_loss(share, norm)
        if diverged:
            raise DivergedError(
                f"step {self.step + 1}: loss {loss}, gradient norm {norm.item()}; nothing of it was saved. "
                "Lower pretrain.learning_rate or pretrain.muon_learning_rate, or raise warmup_steps"
            )
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += sizes.tokens_per_step(self.config)
        self.injector.weights(self.step, self.model)
        self._stepped = True
        return loss, norm.item()

    def _backward(self) -> Tensor:
        """Accumulate the gradient of the mean loss over the global batch; return this rank's part x world size."""
        pretrain, world_size = self.config.pretrain, self.hardware.world_size
        self.own_time.start()
        self.injector.before_step(self.step + 1)
        with self.files.ledger.during("data"):
            rows = self.batches.batch(self.step + self.batch_offset, self.hardware.rank, world_size)
        # The first step compiles: that is start-up.
        self.files.ledger.enter("step" if self._stepped or not self.hardware.compile else "startup")
        batch = torch.from_numpy(rows).to(self.hardware.device, non_blocking=True)
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
            loss = self.injector.loss(self.step + self.batch_offset + 1, loss)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        self.own_time.end()
        return total

    def _agreed_loss(self, share: Tensor, norm: Tensor) -> tuple[float, bool]:
        """Return the mean loss over all ranks, and whether any rank saw something that is not finite."""
        both = torch.stack([share, (~torch.isfinite(share + norm)).to(share)])
        if self.hardware.world_size > 1:
            dist.all_reduce(both, dist.ReduceOp.SUM)
            both[0] /= self.hardware.world_size
        loss, diverged = both.tolist()
        return loss, diverged > 0

    def _is_spike(self, loss: float) -> bool:
        """Tell of a spike of the loss; True if training went back to before it."""
        score, pretrain = self.spikes.score(loss), self.config.pretrain
        if score is not None:
            if self.is_main:
                mean = round(self.spikes.mean, 4)
                self.files.event("spike", step=self.step, loss=loss, score=round(score, 2), mean=mean)
            if pretrain.on_divergence == "rollback" and self.rollbacks < pretrain.max_rollbacks:
                reason = f"step {self.step}: loss {loss:.4g} is {score:.1f} standard deviations above its mean"
                self._roll_back(DivergedError(reason), self.step - 1)
                return True
        self.spikes.add(loss)
        return False

    def _roll_back(self, error: DivergedError, at: int) -> None:
        """Go back to the newest checkpoint and skip the batches since, with that of step `at`; else raise `error`.

        Skipping is an offset between step and batch, which checkpoints hold: a resumed run skips the same ones.
        """
        pretrain = self.config.pretrain
        if self.is_main:
            self.files.event("diverged", step=at + 1, reason=str(error))
        if pretrain.on_divergence != "rollback" or self.rollbacks >= pretrain.max_rollbacks:
            raise error
        rollbacks, batch = self.rollbacks + 1, at + self.batch_offset
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        with self.files.ledger.during("load"):
            if not self.resume():
                raise error
        self.files.ledger.roll_back(self.step)
        skipped = batch + 1 - (self.step + self.batch_offset)
        self.rollbacks, self.batch_offset = rollbacks, self.batch_offset + skipped
        if self.is_main:
            print(f"rolled back to step {self.step}, {skipped} batches are skipped (rollback {rollbacks})")
            self.files.event("rollback", step=self.step, skipped=skipped, rollbacks=rollbacks, batch=batch + 1)

    def _agree(self) -> tuple[str | None, bool]:
        """Ask every rank whether to stop, and rank 0 whether to save, so that all do the same at the same step."""
        reason = self.files.stop_reason()
        save = self.is_main and self.files.save_wanted()
        if self.hardware.world_size == 1:
            return reason, save
        flags = torch.tensor([reason is not None, save], dtype=torch.int32)
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        stop, save = bool(flags[0]), bool(flags[1])
        return (reason or "another rank was asked to stop") if stop else None, save

    def _save_on_request(self, clock: StepClock) -> None:
        """Have a checkpoint of this step, unless it is there."""
        if self.saver.newest != self.step:
            self._checkpoint()
            clock.skip()
        self.saver.wait()
        if self.is_main:
            self.files.save_done()

    def _checkpoint(self) -> None:
        """Save, if this process may and the weights are finite, and account for the time."""
        self.files.fence()
        self._refuse_non_finite()
        if self.files.watchdog:
            self.files.watchdog.expect(f"the save of step {self.step}", self._time_limit())
        with self.files.ledger.during("save"):
            self.save()
        if self.is_main:
            self.files.ledger.write(now=True)
        if self.files.watchdog:
            self.files.watchdog.expect("a step", self._time_limit())

    def _time_limit(self) -> float:
        pretrain = self.config.pretrain
        return pretrain.hang_timeout if self._stepped else pretrain.first_step_timeout

    def _refuse_non_finite(self) -> None:
        """Raise DivergedError on all ranks if any weight is not finite: the newest checkpoint must stay healthy."""
        weights = [parameter.detach() for parameter in self.model.parameters()]
        bad = (~torch.isfinite(nn.utils.get_total_norm(weights))).to(torch.int32)
        if self.hardware.world_size > 1:
            dist.all_reduce(bad, dist.ReduceOp.MAX)
        if bad.item():
            raise DivergedError(f"step {self.step}: a weight is not finite; this step was not saved")

    def _log(self, loss: float, grad_norm: float, clock: StepClock) -> None:
        self._name_stragglers()
        if self.is_main:
            record: dict[str, Any] = {"step": self.step, "tokens": self.tokens, "loss": loss}
            record |= {"lr": self._learning_rate()}
            record |= {"grad_norm": grad_norm, "tokens_per_s": clock.tokens_per_s(), "mfu": None, "time": time.time()}
            append_line(self.files.metrics, record, self.files.fence)
        clock.restart()

    def _name_stragglers(self) -> None:
        """Tell which ranks the others wait for."""
        if self.hardware.world_size == 1:
            return
        found = self.stragglers.compare(self.own_time.take())
        for slow in found if self.is_main else []:
            fellows = self.files.watchdog.fellows if self.files.watchdog else []
            host = next((fellow.host for fellow in fellows if fellow.rank == slow.rank), None)
            print(f"straggler: rank {slow.rank} on {host} is {slow.slower:.0%} slower than the median")
            self.files.event(
                "straggler", step=self.step, rank=slow.rank, rank_host=host, slower=round(slow.slower, 3),
                seconds=round(slow.seconds, 4), median=round(slow.median, 4),
            )  # fmt: skip

    def _learning_rate(self) -> float:
        return float(self.optimizers[0].param_groups[0]["lr"])

    def save(self) -> None:
        """Begin to save a checkpoint of this step; it is on disk when the next one begins, at the latest."""
        counters = {name: getattr(self, name) for name in COUNTERS} | self.spikes.to_counters()
        self.saver.wait()  # before the mark moves on
        self._mark = self.files.ledger.here(self.step)
        self.saver.save(self.step, self.model, self.optimizers, counters)

    def _saved(self, saved: Saved) -> None:
        """Tell of a checkpoint that is on disk, and let old ones go; called on rank 0, in the writer's thread."""
        self.files.ledger.mark(self._mark)
        stall, seconds = round(saved.stall_seconds, 3), round(saved.seconds, 3)
        self.files.event("save", step=saved.step, seconds=seconds, stall_seconds=stall, bytes=saved.bytes)
        pretrain = self.config.pretrain
        remove_old(self.files.checkpoints, pretrain.keep_last, keep_every=pretrain.keep_every)

    def resume(self) -> bool:
        """Load the newest whole checkpoint and cut metrics.jsonl back to it; False if there is none yet."""
        started = time.monotonic()
        self.saver.wait()  # the newest may be on its way
        loaded = load_newest(self.files.checkpoints, self.model, self.optimizers)
        if loaded is None:
            return False
        for name in COUNTERS:
            setattr(self, name, loaded.progress[name])
        self.spikes.load(loaded.progress)
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
