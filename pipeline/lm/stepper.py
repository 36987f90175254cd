"""One optimizer step: a pure function of the state before it and of (seed, step)."""

from __future__ import annotations

import math
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pipeline.config.schema import Config
from pipeline.errors import DivergedError
from pipeline.lm.batches import Batches
from pipeline.lm.hardware import Hardware
from pipeline.lm.inject import Injector
from pipeline.lm.ledger import Ledger
from pipeline.lm.optim import build_optimizers, learning_rate_scale, set_learning_rate
from pipeline.lm.parallel import build_model, whole
from pipeline.lm.stragglers import OwnTime
from pipeline.lm.timing import StepClock
from pipeline.plan import sizes


class Stepper:
    """Model, optimizers and data of one Run, on this rank; what a checkpoint holds, but for the loop's counters."""

    def __init__(
        self, config: Config, hardware: Hardware, batches: Batches, injector: Injector, ledger: Ledger
    ) -> None:
        self.config, self.hardware, self.batches = config, hardware, batches
        self.injector, self.ledger = injector, ledger
        separate = config.pretrain.document_attention == "separate"
        self.model, self.forward = build_model(config, hardware, batches.document_end if separate else None)
        self.optimizers = build_optimizers(self.model, config.pretrain, hardware.precision)
        self.step = self.tokens = self.batch_offset = 0
        self.stepped = False  # by this process
        self.replicated = isinstance(self.forward, DistributedDataParallel)
        self._settled = not self.replicated
        self.own_time = OwnTime(hardware.device)
        self.clock = StepClock(hardware.device)
        if self.replicated:
            self.own_time.watch(self.model)

    @property
    def learning_rate(self) -> float:
        return float(self.optimizers[0].param_groups[0]["lr"])

    def make_step(self) -> tuple[float, float]:
        """Make one optimizer step; return the loss (nats per token, over the global batch) and the gradient's norm.

        Raises DivergedError on all ranks alike, with the model unchanged, where one of the two is not finite on any.
        """
        pretrain = self.config.pretrain
        scale = learning_rate_scale(
            self.step, pretrain.max_steps, warmup_steps=pretrain.warmup_steps, schedule=pretrain.schedule,
            decay_fraction=pretrain.decay_fraction, final_ratio=pretrain.min_learning_rate_ratio,
        )  # fmt: skip
        set_learning_rate(self.optimizers, scale)
        parts = self._begin()
        with self.clock.during("forward_backward"):
            share = self._backward(parts)
        self.injector.gradients(self.step + self.batch_offset + 1, self.model)
        norm = self._clip(pretrain.grad_clip or math.inf)
        loss, diverged = self._agreed_loss(share, norm)
        if diverged:
            raise DivergedError(
                f"step {self.step + 1}: loss {loss}, gradient norm {norm.item()}; nothing of it was saved. "
                "Lower pretrain.learning_rate or pretrain.muon_learning_rate, or raise warmup_steps"
            )
        with self.clock.during("optimizer"):
            for optimizer in self.optimizers:
                optimizer.step()
        self.forget_gradients()
        self.step += 1
        self.tokens += sizes.tokens_per_step(self.config)
        self.injector.weights(self.step, self.model)
        self.stepped = True
        return loss, norm.item()

    def forget_gradients(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def refuse_non_finite(self) -> None:
        """Raise DivergedError on all ranks if any weight is not finite: the newest checkpoint must stay healthy."""
        weights = [parameter.detach() for parameter in self.model.parameters()]
        bad = (~torch.isfinite(whole(nn.utils.get_total_norm(weights)))).to(torch.int32)
        if self.hardware.world_size > 1:
            dist.all_reduce(bad, dist.ReduceOp.MAX)
        if bad.item():
            raise DivergedError(f"step {self.step}: a weight is not finite; this step was not saved")

    def _begin(self) -> tuple[Tensor, ...]:
        """Begin a step: return this rank's micro-batches."""
        self._settle_sums()
        self.own_time.start()
        self.injector.before_step(self.step + 1)
        with self.ledger.during("data"), self.clock.during("data"):
            return self._parts()

    def _backward(self, parts: tuple[Tensor, ...]) -> Tensor:
        """Accumulate the gradient of the mean loss over the global batch; return this rank's part x world size."""
        world_size = self.hardware.world_size
        # The first step compiles: that is start-up.
        self.ledger.enter("step" if self.stepped or not self.hardware.compile else "startup")
        # DDP takes the mean over ranks, each of which holds 1 / world_size of the tokens.
        share = world_size / sizes.tokens_per_step(self.config)
        total = torch.zeros((), device=self.hardware.device)
        for number, part in enumerate(parts, start=1):
            # Sharded gradients are shared out after every part: whole ones would not fit.
            if isinstance(self.forward, DistributedDataParallel):
                self.forward.require_backward_grad_sync = number == len(parts)
            loss = self.injector.loss(self.step + self.batch_offset + 1, self._loss(part) * share)
            if number == len(parts):
                self.own_time.last_part()
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        self.own_time.end()
        return total

    def _settle_sums(self) -> None:
        """Make this process's first backward pass, for nothing.

        By it DDP settles which gradients share a bucket, and with three ranks or more the place in a bucket decides in
        which order they are added. Without it a resumed run's first step would differ in the last bits from its twin's.
        """
        if not self._settled:
            self._loss(self._parts()[-1]).backward()  # type: ignore[no-untyped-call]
            self.forget_gradients()
            self._settled = True

    def _parts(self) -> tuple[Tensor, ...]:
        """Return this rank's rows of the step's batch, cut into micro-batches."""
        rows = self.batches.batch(self.step + self.batch_offset, self.hardware.rank, self.hardware.world_size)
        batch = torch.from_numpy(rows).to(self.hardware.device, non_blocking=True)
        return torch.split(batch, self.config.pretrain.micro_batch_size or len(batch))

    def _loss(self, part: Tensor) -> Tensor:
        """Return the sum of the losses of all tokens of a micro-batch."""
        with self.hardware.autocast():
            return cast(
                Tensor,
                self.forward(
                    part[:, :-1], part[:, 1:], reduction="sum",
                    z_loss=self.config.pretrain.z_loss, chunk_size=self.config.pretrain.loss_chunk_size,
                ),
            )  # fmt: skip

    def _clip(self, most: float) -> Tensor:
        """Scale the gradient down to a norm of `most` where it is larger; return the norm that it had."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = whole(nn.utils.get_total_norm(gradients))
        nn.utils.clip_grads_with_norm_(self.model.parameters(), most, norm)
        return norm

    def _agreed_loss(self, share: Tensor, norm: Tensor) -> tuple[float, bool]:
        """Return the mean loss over all ranks, and whether any rank saw something that is not finite."""
        both = torch.stack([share, (~torch.isfinite(share + norm)).to(share)])
        if self.hardware.world_size > 1:
            dist.all_reduce(both, dist.ReduceOp.SUM)
            both[0] /= self.hardware.world_size
        loss, diverged = both.tolist()
        return loss, diverged > 0
