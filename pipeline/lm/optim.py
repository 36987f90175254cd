"""Optimizers and the learning-rate schedule, a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

if TYPE_CHECKING:
    from pipeline.config_pretrain import PretrainConfig

Schedule = Literal["wsd", "cosine", "linear", "constant"]


class CPUMuon(Muon):
    """torch.optim.Muon with its Newton-Schulz iteration in fp32, for CPUs; the state dict is the same.

    torch.optim.Muon iterates in bf16, which CPUs without bf16 units emulate: 0.8 GF/s instead of 56 on a Zen 3 core,
    which is 60 % of the time of a small model's step against 7 %.
    Always with Nesterov momentum and `match_rms_adamw`, as `build_optimizers` asks of both.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Make one update; there is no closure."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if "momentum_buffer" not in self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p.grad)
                momentum = self.state[p]["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalize(
                    p.grad.lerp(momentum, group["momentum"]), group["ns_coefficients"], group["ns_steps"]
                )
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-0.2 * math.sqrt(max(p.shape)) * group["lr"])  # match_rms_adamw


def orthogonalize(matrix: Tensor, coefficients: tuple[float, float, float], steps: int) -> Tensor:
    """Push the singular values of a matrix towards 1 by the quintic Newton-Schulz iteration (Jordan et al. 2024)."""
    a, b, c = coefficients
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def build_optimizers(model: nn.Module, config: PretrainConfig) -> list[Optimizer]:
    """Return the optimizers that together own every parameter once.

    `muon`: Muon (Jordan et al. 2024) for the matrices inside the layers, AdamW without weight decay for the rest.
    `adamw`: AdamW for all, with weight decay on matrices only (the embedding is one, norms are not).
    Every group keeps its `base_lr`, of which `set_learning_rate` takes a share at each step.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if config.optimizer == "muon":
        matrices = [p for name, p in named if p.ndim == 2 and ".layers." in name]
        # Named by the table, not by the head: with tied embeddings there is no head.
        tables = [p for name, p in named if p.ndim == 2 and ".layers." not in name]
        norms = [p for _, p in named if p.ndim < 2]
        muon = CPUMuon if named[0][1].device.type == "cpu" else Muon
        return _with_base_lr(
            muon(
                [{"params": matrices}],
                lr=config.muon_learning_rate,
                weight_decay=config.weight_decay,
                momentum=config.muon_momentum,
                nesterov=True,
                adjust_lr_fn="match_rms_adamw",
            ),
            _adamw([_group(tables, config.learning_rate, 0.0), _group(norms, config.learning_rate, 0.0)], config),
        )
    matrices, norms = [p for _, p in named if p.ndim >= 2], [p for _, p in named if p.ndim < 2]
    return _with_base_lr(
        _adamw(
            [_group(matrices, config.learning_rate, config.weight_decay), _group(norms, config.learning_rate, 0.0)],
            config,
        )
    )


def _group(params: list[nn.Parameter], lr: float, weight_decay: float) -> dict[str, Any]:
    return {"params": params, "lr": lr, "weight_decay": weight_decay}


def _adamw(groups: list[dict[str, Any]], config: PretrainConfig) -> Optimizer:
    return AdamW(groups, lr=config.learning_rate, betas=config.betas, fused=True)


def _with_base_lr(*optimizers: Optimizer) -> list[Optimizer]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["base_lr"] = group["lr"]
    return list(optimizers)


def learning_rate_scale(
    step: int,
    max_steps: int,
    *,
    warmup_steps: int,
    schedule: Schedule,
    decay_fraction: float = 0.2,
    final_ratio: float = 0.0,
) -> float:
    """Return the share of the base learning rate for `step` (0-based, the step about to be made), in [final_ratio, 1].

    All schedules warm up linearly over `warmup_steps`. Then `wsd` stays at 1 and falls linearly to `final_ratio` over
    the last `decay_fraction` of `max_steps` (MiniCPM, Hu et al. 2024); `linear` and `cosine` fall from the warm-up on.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    decay_steps = max_steps - warmup_steps
    if schedule == "wsd":
        decay_steps = min(decay_steps, max(1, round(decay_fraction * max_steps)))
    # 1 until the decay begins, 0 after the last step
    left = min(1.0, max(0.0, (max_steps - step) / max(1, decay_steps)))
    share = 0.5 - 0.5 * math.cos(math.pi * left) if schedule == "cosine" else left
    return final_ratio + (1.0 - final_ratio) * share


def set_learning_rate(optimizers: Iterable[Optimizer], scale: float) -> None:
    """Set every group's rate to `scale` times its base rate."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["base_lr"] * scale
