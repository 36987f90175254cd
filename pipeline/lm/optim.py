"""Optimizers and the learning-rate schedule, a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from torch import nn
from torch.optim import AdamW, Optimizer

from pipeline.lm.muon import SharedMuon

if TYPE_CHECKING:
    from pipeline.config.pretrain import PretrainConfig

Schedule = Literal["wsd", "cosine", "linear", "constant"]


def build_optimizers(model: nn.Module, config: PretrainConfig, precision: str = "fp32") -> list[Optimizer]:
    """Return the optimizers that together own every parameter once.

    `muon`: Muon (Jordan et al. 2024) for the matrices inside the layers, AdamW without weight decay for the rest.
    `adamw`: AdamW for all, with weight decay on matrices only (the embedding is one, norms are not).
    With `precision` bf16 Muon orthogonalizes in bf16. Every group keeps its `base_lr`, of which `set_learning_rate`
    takes a share at each step.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if config.optimizer == "muon":
        matrices = [p for name, p in named if p.ndim == 2 and ".layers." in name]
        # Named by the table, not by the head: with tied embeddings there is no head.
        tables = [p for name, p in named if p.ndim == 2 and ".layers." not in name]
        norms = [p for _, p in named if p.ndim < 2]
        return _with_base_lr(
            SharedMuon(
                [{"params": matrices}],
                lr=config.muon_learning_rate,
                weight_decay=config.weight_decay,
                momentum=config.muon_momentum,
                nesterov=True,
                adjust_lr_fn="match_rms_adamw",
                bf16=precision == "bf16",
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
