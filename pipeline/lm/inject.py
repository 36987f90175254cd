"""Faults on purpose, for tests: PIPELINE_INJECT="rank=1,step=5,do=raise" (several with `;` between them).

The local scheduler and Slurm jobs submitted by `pipeline` drop the variable; it reaches a job script started by hand.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from pipeline.errors import UserError
from pipeline.lm.muon import local

VARIABLE = "PIPELINE_INJECT"
ACTIONS = (
    "raise", "exit", "kill", "stop", "term", "usr2", "segfault", "abort", "sleep", "slow", "gil",
    "nan_loss", "nan_grad", "nan_weight", "spike", "slow_save", "quota",
)  # fmt: skip


class InjectedError(RuntimeError):
    """The error that was asked for."""


@dataclass(frozen=True)
class Fault:
    """What happens on one rank in one step (`slow`: in each step from that one on).

    nan_loss, nan_grad and spike spoil a batch, whenever it comes: after a rollback that skips it, it comes no more.
    slow_save and quota are about the save of a step, on rank 0: it takes `seconds` longer, or its quota is used up.
    """

    rank: int
    step: int  # 1 is the first; of what spoils a batch, the number of the batch
    do: str
    seconds: float = 3600.0

    @classmethod
    def parse(cls, text: str) -> Fault:
        try:
            words = dict(word.strip().split("=", 1) for word in text.split(","))
            rank, step, do = int(words.pop("rank")), int(words.pop("step")), words.pop("do")
            fault = cls(rank, step, do, float(words.pop("seconds", "3600")))
        except (ValueError, KeyError) as error:
            raise UserError(f"{VARIABLE}: {text!r} is not like rank=1,step=5,do=raise ({error!r})") from None
        if words or fault.do not in ACTIONS:
            raise UserError(f"{VARIABLE}: {text!r}: do is one of {', '.join(ACTIONS)}; seconds is the one other key")
        return fault


class Injector:
    """The faults of this rank; empty in any normal run."""

    def __init__(self, rank: int, event: Callable[..., None], text: str | None = None) -> None:
        text = os.environ.get(VARIABLE, "") if text is None else text
        faults = [Fault.parse(part) for part in text.split(";") if part.strip()]
        self.faults = [fault for fault in faults if fault.rank == rank]
        self._event = event
        for fault in self.faults:
            print(f"WARNING: {VARIABLE} is set: {fault.do} on rank {rank} in step {fault.step}", flush=True)
            event("injected", rank=rank, fault=fault.do, step=fault.step)

    def wants(self, step: int, do: str) -> bool:
        return any(fault.step == step and fault.do == do for fault in self.faults)

    def before_step(self, step: int) -> None:
        """Do what is asked for at the start of `step`."""
        for fault in self.faults:
            if fault.step == step:
                self._event("fault", rank=fault.rank, fault=fault.do, step=step)
            if fault.step == step or (fault.do == "slow" and step >= fault.step):
                _act(fault)

    def loss(self, batch: int, loss: torch.Tensor) -> torch.Tensor:
        """Spoil the loss of a batch if that is asked for."""
        if self.wants(batch, "nan_loss"):
            return loss * float("nan")
        return loss * 1000.0 if self.wants(batch, "spike") else loss

    def gradients(self, batch: int, model: nn.Module) -> None:
        """Spoil one gradient of a batch if that is asked for."""
        if self.wants(batch, "nan_grad"):
            parameter = next(p for p in model.parameters() if p.grad is not None)
            assert parameter.grad is not None
            local(parameter.grad).view(-1)[0] = float("nan")

    def weights(self, step: int, model: nn.Module) -> None:
        """Spoil one weight after `step` if that is asked for."""
        if self.wants(step, "nan_weight"):
            with torch.no_grad():
                local(next(model.parameters())).view(-1)[0] = float("nan")

    def save(self, step: int) -> None:
        """Hold up or fail the save of `step` if that is asked for; called in the writer's thread."""
        for fault in self.faults:
            if fault.step == step and fault.do == "slow_save":
                time.sleep(fault.seconds)
        if self.wants(step, "quota"):
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


def _act(fault: Fault) -> None:
    signals = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM, "usr2": signal.SIGUSR2}
    if fault.do in signals:
        os.kill(os.getpid(), signals[fault.do])
    elif fault.do == "raise":
        raise InjectedError(f"asked for by {VARIABLE} in step {fault.step}")
    elif fault.do == "exit":
        os._exit(0)
    elif fault.do == "segfault":
        ctypes.string_at(0)
    elif fault.do == "abort":
        os.abort()
    elif fault.do in ("sleep", "slow"):
        time.sleep(fault.seconds)
    elif fault.do == "gil":
        ctypes.PyDLL(None).sleep(int(fault.seconds))  # unlike CDLL, it keeps the interpreter's lock
