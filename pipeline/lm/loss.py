"""The cross-entropy of a head, without all its logits in memory, and the z-loss that keeps them small."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100
"""A target with this value is not predicted: its loss is 0 and it does not count in the mean."""

Chunk = tuple[Tensor, Any, Any]  # sum of losses, gradients of x and of the weight or None


def cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, reduction: Literal["mean", "sum", "none"], z_loss: float
) -> Tensor:
    """Return the losses of x (B, T, D) under the head `weight` (V, D): (B x T,) or a scalar; targets (B, T)."""
    logits = F.linear(x, weight).flatten(0, 1).float()
    loss = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE_INDEX, reduction=reduction)
    return with_z_loss(loss, logits, targets.flatten(), z_loss) if z_loss else loss


def with_z_loss(loss: Tensor, logits: Tensor, targets: Tensor, share: float) -> Tensor:
    """Add to the gradient of `loss` that of `share` x log(Z)^2, summed over tokens (PaLM, Chowdhery et al. 2022).

    Its value stays the cross-entropy: curves with and without z-loss can be compared. logits (N, V) fp32, targets (N,).
    """
    z_loss = share * (logits.logsumexp(-1).square() * (targets != IGNORE_INDEX)).sum()
    return loss + (z_loss - z_loss.detach())


def chunked_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk_size: int,
    z_loss: float = 0.0,
    chunk: Callable[..., Chunk] | None = None,
) -> Tensor:
    """Return the sum of the losses of x (N, D) under the head `weight` (V, D), targets (N,), as a scalar in fp32.

    The logits of `chunk_size` tokens exist at once, and their gradient is made beside them: a head of 128k pieces
    over 8,192 tokens would keep 4.2 GB of fp32 logits and as much of gradients until the backward pass. Nothing is
    computed twice. Under autocast the products are made in its format; the weight's gradient is summed up in fp32.
    `chunk` is chunk_loss, perhaps compiled.
    """
    arguments = (x, weight, targets, chunk_size, z_loss, chunk or chunk_loss)
    return cast(Tensor, _ChunkedCrossEntropy.apply(*arguments))  # type: ignore[no-untyped-call]


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Make the gradients in the forward pass; the backward pass scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        chunk_size: int,
        z_loss: float,
        chunk: Callable[..., Chunk],
    ) -> Tensor:
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        wants_gradients = any(ctx.needs_input_grad[:2])
        total = torch.zeros((), device=x.device)
        grad_x = torch.empty_like(x) if wants_gradients else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_gradients else None
        with torch.autocast(device, enabled=False):
            low_x, low_weight = x.to(dtype), weight.to(dtype)
            for start in range(0, len(x), chunk_size):
                part = slice(start, start + chunk_size)
                loss, part_x, part_weight = chunk(low_x[part], low_weight, targets[part], z_loss, wants_gradients)
                total += loss
                if grad_x is not None and grad_weight is not None:
                    grad_x[part] = part_x
                    grad_weight.add_(part_weight)
        if grad_x is not None and grad_weight is not None:
            ctx.save_for_backward(grad_x, grad_weight.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight = ctx.saved_tensors
        return grad_x * gradients[0], grad_weight * gradients[0], None, None, None, None


def chunk_loss(x: Tensor, weight: Tensor, targets: Tensor, z_loss: float, wants_gradients: bool) -> Chunk:
    """Return the losses' sum of x (n, D), and its gradients where they are wanted."""
    logits = (x @ weight.T).float()
    log_z = logits.logsumexp(-1)
    kept = targets != IGNORE_INDEX
    index = targets.clamp(min=0)[:, None]
    loss = ((log_z - logits.gather(-1, index)[:, 0]) * kept).sum()
    if not wants_gradients:
        return loss, None, None
    scale = (1.0 + 2.0 * z_loss * log_z) * kept
    gradient = (logits - log_z[:, None]).exp() * scale[:, None]
    gradient = gradient.scatter_add(-1, index, -kept.to(gradient.dtype)[:, None]).to(x.dtype)
    return loss, gradient @ weight, gradient.T @ x
