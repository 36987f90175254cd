"""Attention by blocks of queries gives what torch's kernel gives, backwards too."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from pipeline.lm import attention
from pipeline.lm.attention import BLOCK, MOST_BLOCKS, attend, attend_in_blocks
from pipeline.lm.model import document_mask


def queries_keys_values(time: int, heads: int = 4, kv_heads: int = 4) -> list[torch.Tensor]:
    torch.manual_seed(time)
    return [torch.randn(2, n, time, 16, requires_grad=True) for n in (heads, kv_heads, kv_heads)]


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("time", [1, 7, BLOCK, BLOCK + 1, 3 * BLOCK])
@pytest.mark.parametrize("documents", [False, True])
def test_blocks_are_torchs_attention(time: int, kv_heads: int, documents: bool) -> None:
    qkv = queries_keys_values(time, kv_heads=kv_heads)
    mask = document_mask(torch.randint(20, (2, time)), 0) if documents else None
    ours = attend_in_blocks(*qkv, mask)
    theirs = F.scaled_dot_product_attention(*qkv, attn_mask=mask, is_causal=not documents, enable_gqa=True)
    torch.testing.assert_close(ours, theirs)
    direction = torch.randn_like(ours)
    gradients = [torch.autograd.grad(y, qkv, direction, retain_graph=True) for y in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("time", "in_blocks"), [(BLOCK, True), (BLOCK * MOST_BLOCKS + 1, False)])
def test_only_the_compiler_is_given_blocks_and_not_too_many(
    time: int, in_blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def spy(*arguments: object) -> torch.Tensor:
        seen.append(time)
        return attend_in_blocks(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(attention, "attend_in_blocks", spy)
    qkv = queries_keys_values(time)
    eager = attend(*qkv, None)
    assert not seen
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    torch.testing.assert_close(attend(*qkv, None), eager)
    assert bool(seen) == in_blocks


def test_a_compiler_makes_one_graph_of_it() -> None:
    qkv = queries_keys_values(BLOCK + 3)
    compiled = torch.compile(partial(attend, mask=None), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*qkv), attend(*qkv, None))
