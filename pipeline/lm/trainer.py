"""The training loop: agree, step, log, save, go back; stepper.py makes the step itself."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipeline.config.schema import Config
from pipeline.errors import DivergedError
from pipeline.files import append_line, read_lines, write_text
from pipeline.lm.batches import Batches
from pipeline.lm.checkpoint import load_newest, remove_old
from pipeline.lm.divergence import SpikeDetector
from pipeline.lm.hardware import Hardware
from pipeline.lm.init_from import load_folder
from pipeline.lm.inject import Injector
from pipeline.lm.ledger import Ledger, Mark
from pipeline.lm.origin import changes
from pipeline.lm.saver import LIMIT, Hooks, Saved, Saver
from pipeline.lm.sinks import Sink, numbers
from pipeline.lm.stepper import Stepper
from pipeline.lm.stragglers import Stragglers
from pipeline.lm.timing import StepClock, measured, peak_flops
from pipeline.lm.together import on_all, on_main
from pipeline.lm.watchdog import Watchdog
from pipeline.plan import sizes

STEPPER_COUNTERS = ("step", "tokens", "batch_offset")


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
    wanted: Callable[[int], bool] = lambda step: False  # whether a step's checkpoint is still to be read by others
    fence: Callable[[], None] = lambda: None  # raises where another process has taken this Run over
    ledger: Ledger = field(default_factory=lambda: Ledger(time.time(), lambda account: None))
    watchdog: Watchdog | None = None
    look: Callable[[], None] = lambda: None  # called on rank 0 first; raises where checkpoints were lost
    begins: Callable[[], None] = lambda: None  # called on rank 0 before step 0
    first_step_done: Callable[[], None] = lambda: None  # called on rank 0 when every rank has made this attempt's first
    sinks: list[Sink] = field(default_factory=list)  # that get every line of metrics too, on rank 0


class Trainer:
    """One Run's training on this rank, from its newest checkpoint to its last step."""

    def __init__(
        self, config: Config, hardware: Hardware, batches: Batches, files: Files, about: dict[str, Any]
    ) -> None:
        self.config, self.hardware, self.files = config, hardware, files
        self.stepper = Stepper(config, hardware, batches, Injector(hardware.rank, files.event), files.ledger)
        self.rollbacks = 0
        clock = files.watchdog.clock if files.watchdog else time.monotonic
        self.saver = Saver(files.checkpoints, about, Hooks(self._before_publish, self._saved), clock=clock)
        self.spikes = SpikeDetector(config.pretrain.spike_threshold, config.pretrain.spike_window)
        self.stragglers = Stragglers(config.pretrain.straggler_threshold)
        length = config.pretrain.sequence_length
        self.flops_per_token = sizes.flops_per_token(config.model, config.tokenize.vocab_size, length)
        self.peak = peak_flops(config.pretrain.peak_tflops, hardware.device)
        self._mark: Mark = (0, 0.0, 0.0)  # of the save in flight
        if files.watchdog:
            files.watchdog.waits = lambda: self.stepper.own_time.waits

    @property
    def is_main(self) -> bool:
        return self.hardware.rank == 0

    @property
    def step(self) -> int:
        return self.stepper.step

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
            on_main(self.files.look)
            resumed = self.resume()
        if resumed:
            self.files.ledger.mark(self.files.ledger.here(self.step))
        else:
            self._begin()
            self._checkpoint()  # an untrained one: a disk that cannot be written is found before the first hour
        clock = self.stepper.clock = StepClock(self.hardware.device)
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

    def _begin(self) -> None:
        """Take over the weights that pretrain.init_from names; without it they are random."""
        if self.is_main:
            self.files.begins()
        if folder := self.config.pretrain.init_from:
            on_all(lambda: load_folder(Path(folder), self.stepper.model))
            if self.is_main:
                print(f"begin with the weights of {folder}")
                self.files.event("init", path=folder)

    def _advance(self, clock: StepClock) -> None:
        """Make one step; log and save where it is time to."""
        pretrain = self.config.pretrain
        is_first = not self.stepper.stepped
        loss, grad_norm = self.stepper.make_step()
        if is_first and self.is_main:
            self.files.first_step_done()
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
        rollbacks, batch = self.rollbacks + 1, at + self.stepper.batch_offset
        self.stepper.forget_gradients()
        with self.files.ledger.during("load"):
            if not self.resume():
                raise error
        self.files.ledger.roll_back(self.step)
        skipped = batch + 1 - (self.step + self.stepper.batch_offset)
        self.rollbacks = rollbacks
        self.stepper.batch_offset += skipped
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
        self.stepper.refuse_non_finite()
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
        return pretrain.hang_timeout if self.stepper.stepped else pretrain.first_step_timeout

    def _log(self, loss: float, grad_norm: float, clock: StepClock) -> None:
        self._name_stragglers()
        if self.is_main:
            record: dict[str, Any] = {"step": self.step, "tokens": self.stepper.tokens, "loss": loss}
            record |= {"lr": self.stepper.learning_rate, "grad_norm": grad_norm, "time": time.time()}
            record |= measured(clock, self.flops_per_token, self.peak, self.hardware.world_size, self.hardware.device)
            append_line(self.files.metrics, record, self.files.fence)
            for sink in self.files.sinks:
                sink.write(self.step, numbers(record))
        clock.restart()

    def _name_stragglers(self) -> None:
        """Tell which ranks the others wait for."""
        if self.hardware.world_size == 1:
            return
        found = self.stragglers.compare(self.stepper.own_time.take())
        for slow in found if self.is_main else []:
            fellows = self.files.watchdog.fellows if self.files.watchdog else []
            host = next((fellow.host for fellow in fellows if fellow.rank == slow.rank), None)
            print(f"straggler: rank {slow.rank} on {host} is {slow.slower:.0%} slower than the median")
            self.files.event(
                "straggler", step=self.step, rank=slow.rank, rank_host=host, slower=round(slow.slower, 3),
                seconds=round(slow.seconds, 4), median=round(slow.median, 4),
            )  # fmt: skip

    def save(self) -> None:
        """Begin to save a checkpoint of this step; it is on disk when the next one begins, at the latest."""
        counters = {name: getattr(self.stepper, name) for name in STEPPER_COUNTERS}
        counters |= {"rollbacks": self.rollbacks} | self.spikes.to_counters()
        self.saver.wait()  # before the mark moves on
        self._mark = self.files.ledger.here(self.step)
        self.saver.save(self.step, self.stepper.model, self.stepper.optimizers, counters)

    def _before_publish(self) -> None:
        """Refuse to publish what is no longer ours; called on rank 0, in the writer's thread."""
        self.stepper.injector.save(self._mark[0])
        self.files.fence()

    def _saved(self, saved: Saved) -> None:
        """Tell of a checkpoint that is on disk, and let old ones go; called on rank 0, in the writer's thread."""
        self.files.ledger.mark(self._mark)
        stall, seconds = round(saved.stall_seconds, 3), round(saved.seconds, 3)
        self.files.event("save", step=saved.step, seconds=seconds, stall_seconds=stall, bytes=saved.bytes)
        pretrain = self.config.pretrain
        remove_old(self.files.checkpoints, pretrain.keep_last, keep_every=pretrain.keep_every, wanted=self.files.wanted)

    def resume(self) -> bool:
        """Load the newest whole checkpoint and cut metrics.jsonl back to it; False if there is none yet."""
        started = time.monotonic()
        self.saver.wait()  # the newest may be on its way
        loaded = load_newest(self.files.checkpoints, self.stepper.model, self.stepper.optimizers)
        if loaded is None:
            return False
        changed = changes(loaded.path, loaded.manifest, self.saver.about)
        if (ranks := loaded.manifest["world_size"]) != self.hardware.world_size:
            changed.append(f"ranks: {ranks} -> {self.hardware.world_size}")
        for name in STEPPER_COUNTERS:
            setattr(self.stepper, name, loaded.progress[name])
        self.rollbacks = loaded.progress["rollbacks"]
        self.spikes.load(loaded.progress)
        self.saver.newest = self.step
        self.saver.reserve(loaded.bytes // self.hardware.world_size)
        if self.is_main:
            for reason in loaded.refused:
                print(f"refused a checkpoint: {reason}")
                self.files.event("checkpoint refused", reason=reason)
            if changed:
                print(f"changed since {loaded.path.name}: {'; '.join(changed)}")
                self.files.event("changed", step=self.step, changes=changed)
            cut_back(self.files.metrics, self.step)
            for sink in self.files.sinks:
                sink.rewind(self.step)
            self.files.event("resume", step=self.step, seconds=round(time.monotonic() - started, 3))
            print(f"resume from step {self.step} of {self.config.pretrain.max_steps}")
        return True


def cut_back(metrics: Path, step: int) -> None:
    """Drop the lines of steps that the checkpoint of `step` has not seen: they will be made again."""
    kept = [record for record in read_lines(metrics) if record.get("step", 0) <= step]
    write_text(metrics, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in kept))
