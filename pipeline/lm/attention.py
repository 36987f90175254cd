"""Causal attention: torch's own kernels, or on a CPU products of blocks that the compiler joins with the softmax."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128  # queries
MOST_BLOCKS = 8  # the compiler writes each out, and the probabilities are kept for the backward pass


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Mix v (B, K, T, E) by queries q (B, H, T, E) and keys k (B, K, T, E); H is a multiple of K.

    `mask` (…, T, T) is True where a query may look; None means back and at itself.
    """
    if q.device.type == "cpu" and torch.compiler.is_compiling() and q.shape[2] <= BLOCK * MOST_BLOCKS:
        return attend_in_blocks(q, k, v, mask)
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)


def attend_in_blocks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Do the same by plain products, for one block of queries after the other, each with the keys up to its end.

    torch's kernel for CPUs takes twice the time of these once they are compiled, for its backward pass above all.
    """
    time, scale = q.shape[2], q.shape[3] ** -0.5
    if q.shape[1] != k.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    blocks = []
    for start in range(0, time, BLOCK):
        end = min(start + BLOCK, time)
        if mask is None:
            seen = torch.ones(end - start, end, dtype=torch.bool, device=q.device).tril(start)
        else:
            seen = mask[..., start:end, :end]
        scores = (q[:, :, start:end] @ k[:, :, :end].mT).float() * scale
        shares = scores.masked_fill(~seen, -math.inf).softmax(-1).to(v.dtype)
        blocks.append(shares @ v[:, :, :end])
    return torch.cat(blocks, dim=2)
