"""The forward pass for inference: a cache of slots, one text in each, and logits of what comes next.

Whatever else is computed beside it, a text gets the same logits to the bit. A matrix product of another shape may add
in another order, so here every shape is that of the text alone: prompts are read one by one, and new tokens in tiles of
a fixed number of slots, used or not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.lm.model import Block, Transformer, apply_rope, head_size, kv_heads, rope_tables

Store = Callable[[Tensor, Tensor], Tensor]  # puts new keys or values into a cache, and returns what may be looked at
TILE = 16  # slots; fewer would cost a GPU the same, and a large batch reads the weights once a tile


@dataclass(frozen=True)
class Part:
    """Tokens to read into a slot, from position `start` on; what the slot held from there on is forgotten."""

    slot: int
    start: int
    ids: list[int]


class Engine(ABC):
    """Weights and a cache of `slots` texts."""

    slots: int
    vocab_size: int

    @abstractmethod
    def forward(self, parts: Sequence[Part]) -> Tensor:
        """Read parts, each of another slot; return logits (N, V), fp32 on the CPU, after the last token of each."""


class TorchEngine(Engine):
    """By torch, on any device: fused projections, and a cache whose place never moves."""

    @torch.inference_mode()
    def __init__(self, model: Transformer, slots: int, device: str, dtype: torch.dtype) -> None:
        self.slots, self.vocab_size = -(-slots // TILE) * TILE, model.vocab_size
        self._model = model.to(device=device, dtype=dtype).eval()
        config = model.config
        self._layers = [_Layer(cast(Block, layer)) for layer in self._model.model.layers]
        shape = (self.slots, kv_heads(config), model.max_sequence_length, head_size(config))
        self._caches = [tuple(torch.zeros(shape, device=device, dtype=dtype) for _ in "kv") for _ in self._layers]
        E, theta = head_size(config), config.rope_theta
        self._rope = rope_tables(model.max_sequence_length, E, theta, torch.device(device))
        self._places = torch.arange(model.max_sequence_length, device=device)
        self._device = device

    @torch.inference_mode()
    def forward(self, parts: Sequence[Part]) -> Tensor:
        logits = torch.empty(len(parts), self.vocab_size)
        tiles: dict[int, list[tuple[int, Part]]] = {}
        for number, part in enumerate(parts):
            if len(part.ids) > 1:
                logits[number] = self._read(part)
            else:
                tiles.setdefault(part.slot // TILE, []).append((number, part))
        for tile, members in tiles.items():
            logits[[number for number, _ in members]] = self._step(tile, [part for _, part in members])
        return logits

    def _read(self, part: Part) -> Tensor:
        """Read several tokens of one text; return logits (V,)."""
        slot, start, end = slice(part.slot, part.slot + 1), part.start, part.start + len(part.ids)
        mask = self._places[None, :end] <= self._places[start:end, None]
        rope = (self._rope[0][start:end], self._rope[1][start:end])

        def store(cache: Tensor, new: Tensor) -> Tensor:
            cache[slot, :, start:end] = new
            return cache[slot, :, :end]

        x = self._run(torch.tensor([part.ids], device=self._device), rope, mask, store)
        return self._head(x[:, -1])[0]

    def _step(self, tile: int, parts: Sequence[Part]) -> Tensor:
        """Read one token in each of some slots of a tile; return logits (N, V). The other slots compute for nothing."""
        rows = [part.slot % TILE for part in parts]
        ids, positions = [0] * TILE, [0] * TILE
        for row, part in zip(rows, parts, strict=True):
            ids[row], positions[row] = part.ids[0], part.start
        at = torch.tensor(positions, device=self._device)
        slots, row_numbers = slice(tile * TILE, (tile + 1) * TILE), torch.tensor(rows, device=self._device)
        mask = (self._places <= at[:, None])[:, None, None]
        rope = (self._rope[0][at][:, None], self._rope[1][at][:, None])

        def store(cache: Tensor, new: Tensor) -> Tensor:
            part_of = cache[slots]
            part_of[row_numbers, :, at[row_numbers]] = new[row_numbers, :, 0]
            return part_of

        x = self._run(torch.tensor(ids, device=self._device)[:, None], rope, mask, store)
        return self._head(x[:, -1])[rows]

    def _run(self, ids: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor, store: Store) -> Tensor:
        x = F.embedding(ids, self._model.model.embed_tokens.weight)
        for layer, (keys, values) in zip(self._layers, self._caches, strict=True):
            q, k, v = layer.project(x, rope)
            keys_, values_ = store(keys, k), store(values, v)
            y = F.scaled_dot_product_attention(q, keys_, values_, attn_mask=mask, enable_gqa=layer.grouped)
            x = layer.finish(x, y)
        return cast(Tensor, self._model.model.norm(x))

    def _head(self, x: Tensor) -> Tensor:
        model = self._model
        weight = model.model.embed_tokens.weight if model.lm_head is None else model.lm_head.weight
        return F.linear(x, weight).float().cpu()


class _Layer:
    """A Block with one matrix for queries, keys and values, and one for gate and up."""

    def __init__(self, block: Block) -> None:
        attention, mlp = block.self_attn, block.mlp
        self.block, self.head_size = block, attention.head_size
        self.grouped = attention.q_proj.out_features != attention.k_proj.out_features
        self.qkv = _fuse(attention.q_proj, attention.k_proj, attention.v_proj)
        self.gate_up = _fuse(mlp.gate_proj, mlp.up_proj)
        self.sizes = [projection.out_features for projection in (attention.q_proj, attention.k_proj, attention.v_proj)]

    def project(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries (B, H, T, E), keys and values (B, K, T, E) of x (B, T, D)."""
        attention = self.block.self_attn
        fused = torch.split(F.linear(self.block.input_layernorm(x), self.qkv), self.sizes, dim=-1)
        q, k, v = (part.view(*part.shape[:-1], -1, self.head_size) for part in fused)
        if attention.qk_norm:
            q, k = attention.q_norm(q), attention.k_norm(k)
        return apply_rope(q, rope).transpose(1, 2), apply_rope(k, rope).transpose(1, 2), v.transpose(1, 2)

    def finish(self, x: Tensor, y: Tensor) -> Tensor:
        """Add what attention found, y (B, H, T, E), and the feed-forward layer to x (B, T, D)."""
        x = x + self.block.self_attn.o_proj(y.transpose(1, 2).flatten(2))
        gate, up = F.linear(self.block.post_attention_layernorm(x), self.gate_up).chunk(2, dim=-1)
        return cast(Tensor, x + self.block.mlp.down_proj(F.silu(gate) * up))


def _fuse(*projections: nn.Linear) -> Tensor:
    """Return one matrix of several, which become views of it: no weight is held twice."""
    fused = torch.cat([projection.weight for projection in projections])
    at = 0
    for projection in projections:
        projection.weight = nn.Parameter(fused[at : at + projection.out_features], requires_grad=False)
        at += projection.out_features
    return fused
