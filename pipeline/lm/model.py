"""The Llama-family Transformer that we train, with the parameter names of Hugging Face.

Tensors are named by their axes: B batch, T time, D hidden size, H heads, K key/value heads, E head size, V vocabulary.
The state dict is that of transformers' LlamaForCausalLM, or of Qwen3ForCausalLM with `qk_norm`: export is a copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from pipeline.lm.attention import attend
from pipeline.lm.loss import chunk_loss, chunked_cross_entropy, cross_entropy

if TYPE_CHECKING:
    from pipeline.config.pretrain import ModelConfig


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads (Ainslie et al. 2023) and RoPE."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_size = head_size(config)
        D = config.hidden_size
        q_size, kv_size = config.num_attention_heads * self.head_size, kv_heads(config) * self.head_size
        self.q_proj = nn.Linear(D, q_size, bias=False)
        self.k_proj = nn.Linear(D, kv_size, bias=False)
        self.v_proj = nn.Linear(D, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, D, bias=False)
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(self.head_size, eps=config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(self.head_size, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        """Mix x (B, T, D) over time. `mask` (…, T, S) is True where a query may look; None means plain causal."""
        B, T, _ = x.shape
        q, k, v = (p(x).view(B, T, -1, self.head_size) for p in (self.q_proj, self.k_proj, self.v_proj))
        if self.qk_norm:
            q, k = rms_norm(q, self.q_norm), rms_norm(k, self.k_norm)
        q, k, v = apply_rope(q, rope).transpose(1, 2), apply_rope(k, rope).transpose(1, 2), v.transpose(1, 2)
        y = attend(q, k, v, mask)
        return cast(Tensor, self.o_proj(y.transpose(1, 2).reshape(B, T, -1)))


class MLP(nn.Module):
    """SwiGLU, Shazeer 2020."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (B, T, D) to (B, T, D), each token by itself."""
        return cast(Tensor, self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


class Block(nn.Module):
    """One pre-norm layer: attention, then MLP, each added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        """Map the residual stream x (B, T, D) to the next layer's."""
        x = x + self.self_attn(self.input_layernorm(x), rope, mask)
        return cast(Tensor, x + self.mlp(self.post_attention_layernorm(x)))


class Decoder(nn.Module):
    """Embedding, layers and last norm: the part that Hugging Face calls `model`."""

    def __init__(self, config: ModelConfig, vocab_size: int, document_end: int | None) -> None:
        super().__init__()
        self.document_end = document_end
        self.embed_tokens = nn.Embedding(vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.head_size, self.rope_theta = head_size(config), config.rope_theta

    def forward(self, ids: Tensor) -> Tensor:
        """Return the last hidden states (B, T, D) of ids (B, T)."""
        rope = rope_tables(ids.shape[1], self.head_size, self.rope_theta, ids.device)
        mask = None if self.document_end is None else document_mask(ids, self.document_end)
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, rope, mask)
        return cast(Tensor, self.norm(x))


class Transformer(nn.Module):
    """A Llama (or Qwen3, with `qk_norm`) language model.

    With `tie_word_embeddings` there is no `lm_head`: the embedding is read as the head, so that no tensor is stored,
    sharded or saved twice. With `document_end`, an id, a token sees only its own document and the end before it.
    May be built under `torch.device("meta")`; `to_empty` and `init_weights` then make it real.
    """

    def __init__(
        self, config: ModelConfig, vocab_size: int, max_sequence_length: int, document_end: int | None = None
    ) -> None:
        super().__init__()
        self.config, self.vocab_size, self.max_sequence_length = config, vocab_size, max_sequence_length
        self.model = Decoder(config, vocab_size, document_end)
        self.whole_loss, self.chunk_loss = cross_entropy, chunk_loss  # or what parallel.py has compiled of them
        self.lm_head = None if config.tie_word_embeddings else nn.Linear(config.hidden_size, vocab_size, bias=False)

    def forward(
        self,
        ids: Tensor,
        targets: Tensor | None = None,
        reduction: Literal["mean", "sum", "none"] = "mean",
        *,
        z_loss: float = 0.0,
        chunk_size: int | None = None,
    ) -> Tensor:
        """Return logits (B, T, V) of ids (B, T) int64, or with targets (B, T) their negative log-likelihood in nats.

        The loss is a scalar, or (B, T) with `reduction="none"`; targets of IGNORE_INDEX are left out.
        For training, with `reduction="sum"`: `z_loss` is the share of log(Z)^2 in the gradient, and logits of
        `chunk_size` tokens are made at a time.
        """
        x = self.model(ids)
        head = self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        if targets is None:
            return F.linear(x, head)
        if chunk_size is not None:
            hidden = x.flatten(0, 1)
            return chunked_cross_entropy(hidden, head, targets.flatten(), chunk_size, z_loss, self.chunk_loss)
        loss = self.whole_loss(x, head, targets, reduction, z_loss)
        return loss.view_as(targets) if reduction == "none" else loss

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Fill all parameters from `seed` alone: neither the global generator nor the sharding changes the result.

        Normal with std 0.02; what writes to the residual stream is divided by sqrt(2 L) (GPT-2); norms are 1.
        """
        generator: torch.Generator | None = None
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
                continue
            std = 0.02
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std /= (2 * self.config.num_hidden_layers) ** 0.5
            generator = generator or torch.Generator(parameter.device).manual_seed(seed)
            full = torch.empty(parameter.shape, device=parameter.device).normal_(0.0, std, generator=generator)
            if isinstance(parameter, DTensor):  # every rank draws the whole tensor and keeps its part
                full = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.copy_(full)


def rms_norm(x: Tensor, norm: nn.RMSNorm) -> Tensor:
    """Normalize x in its own format: under autocast torch's fused kernel refuses a weight in another one."""
    return F.rms_norm(x, norm.normalized_shape, norm.weight.to(x.dtype), norm.eps)


def head_size(config: ModelConfig) -> int:
    """Return E, the size of one attention head."""
    return config.hidden_size // config.num_attention_heads


def kv_heads(config: ModelConfig) -> int:
    """Return K, the number of key/value heads: as many as query heads unless the config groups them."""
    return config.num_key_value_heads or config.num_attention_heads


def document_mask(ids: Tensor, document_end: int) -> Tensor:
    """Return a mask (B, 1, T, T), True where a token of ids (B, T) may look: back, and within its own document."""
    document = (ids == document_end).cumsum(1)  # an end counts to what comes after it, of which it predicts the first
    return (document[:, None, :, None] == document[:, None, None, :]).tril()


def rope_tables(length: int, head_size: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cos and sin (T, 1, E) in fp32 for positions 0..length-1 (RoPE, Su et al. 2021).

    They are a thousandth of a layer's work, so they are made anew: no buffer to fill after the meta device or a cast.
    """
    frequency = theta ** -(torch.arange(0, head_size, 2, device=device, dtype=torch.float32) / head_size)
    angle = torch.arange(length, device=device, dtype=torch.float32)[:, None] * frequency
    angle = torch.cat((angle, angle), dim=-1)[:, None, :]
    return angle.cos(), angle.sin()


def apply_rope(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate x (B, T, H, E); pairs are (i, i + E/2), Hugging Face's convention, so weights need no permutation."""
    cos, sin = rope
    left, right = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-right, left), dim=-1) * sin).to(x.dtype)


def num_parameters(model: nn.Module, *, embedding: bool = True) -> int:
    """Count the parameters of a Transformer, without the input embedding if not `embedding`."""
    return sum(p.numel() for name, p in model.named_parameters() if embedding or "embed_tokens" not in name)
