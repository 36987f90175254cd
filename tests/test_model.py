"""The Transformer: causal, cached, tied, seeded."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from pipeline.config.pretrain import ModelConfig
from pipeline.lm.loss import IGNORE_INDEX, chunked_cross_entropy, with_z_loss
from pipeline.lm.model import Transformer, num_parameters
from pipeline.lm.parallel import prepare_block
from pipeline.plan import sizes

V, T = 50, 16


def config(**changes: Any) -> Any:
    keys = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    keys |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    return SimpleNamespace(
        **{
            **keys,
            "rope_theta": 10_000.0,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "qk_norm": True,
            **changes,
        }
    )


def make(seed: int = 0, **changes: Any) -> Transformer:
    model = Transformer(config(**changes), V, T)
    model.init_weights(seed)
    return model


def tokens(B: int = 2, length: int = T) -> torch.Tensor:
    return torch.randint(V, (B, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kv_heads", [None, 1, 2])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_a_later_token_does_not_change_earlier_logits(kv_heads: int | None, qk_norm: bool) -> None:
    model, ids = make(num_key_value_heads=kv_heads, qk_norm=qk_norm), tokens()
    changed = ids.clone()
    changed[:, 9] = (changed[:, 9] + 1) % V
    before, after = model(ids), model(changed)
    assert before.shape == (2, T, V)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_documents_kept_separate_are_as_if_each_stood_alone() -> None:
    end, ids = 1, torch.tensor([[5, 6, 1, 7, 8, 9, 1, 10, 11, 12], [1, 5, 6, 7, 1, 1, 8, 1, 9, 10]])
    model = Transformer(config(), V, T, document_end=end)
    model.init_weights(0)
    whole = model(ids)
    for row, text in enumerate(ids.tolist()):
        starts = [place for place, token in enumerate(text) if token == end or place == 0]
        for start, stop in zip(starts, [*starts[1:], len(text)], strict=True):  # an end leads what comes after it
            alone = make()(ids[row : row + 1, start:stop])
            torch.testing.assert_close(whole[row : row + 1, start:stop], alone, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(whole, make()(ids))


def test_losses_agree_and_ignored_targets_do_not_count() -> None:
    model, ids = make(), tokens(length=T + 1)
    targets = ids[:, 1:].clone()
    targets[0, :4] = IGNORE_INDEX
    nll = model(ids[:, :-1], targets, reduction="none")
    assert nll.shape == targets.shape
    assert (nll[0, :4] == 0).all()
    assert (nll[0, 4:] > 0).all()
    kept = targets != IGNORE_INDEX
    torch.testing.assert_close(model(ids[:, :-1], targets), nll[kept].mean())
    torch.testing.assert_close(model(ids[:, :-1], targets, reduction="sum"), nll.sum())
    log_p = model(ids[:, :-1]).log_softmax(-1)
    torch.testing.assert_close(nll[kept], -log_p.gather(-1, targets.clamp(min=0)[..., None])[..., 0][kept])


def test_names_are_those_of_hugging_face() -> None:
    names = set(make(tie_word_embeddings=False, num_hidden_layers=1).state_dict())
    layer = ["input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    layer += [f"self_attn.{x}" for x in ["q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"]]
    top = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    assert names == top | {f"model.layers.0.{x}.weight" for x in layer}


def test_tied_embeddings_are_stored_once_and_learn_from_the_head() -> None:
    tied, untied = make(), make(tie_word_embeddings=False)
    assert "lm_head.weight" not in tied.state_dict()
    assert num_parameters(untied) - num_parameters(tied) == V * 32
    tied(tokens(B=1), tokens(B=1)).backward()
    gradient = tied.model.embed_tokens.weight.grad
    assert gradient is not None
    assert (gradient != 0).any(dim=1).all()  # also for tokens that were never input


def test_the_seed_alone_decides_the_weights() -> None:
    torch.manual_seed(1)
    first = make(seed=7).state_dict()
    torch.manual_seed(2)
    with torch.device("meta"):
        model = Transformer(config(), V, T)
    model.to_empty(device="cpu")
    model.init_weights(7)
    for name, value in model.state_dict().items():
        assert torch.equal(value, first[name]), name
    assert not torch.equal(make(seed=8).model.embed_tokens.weight, first["model.embed_tokens.weight"])
    assert torch.isfinite(model(tokens())).all()


def test_flops_count_the_weights_that_multiply() -> None:
    model = make(tie_word_embeddings=False, num_key_value_heads=None)
    N = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "embed_tokens" not in name)
    full = ModelConfig.model_validate(vars(model.config))
    assert sizes.flops_per_token(full, V, T) == 6 * N + 12 * 2 * 32 * T
    assert num_parameters(model, embedding=False) == num_parameters(model) - V * 32


def losses(hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, **how: Any) -> list[torch.Tensor]:
    """Return the loss and the gradients of hidden states and head, times 0.5."""
    x, weight = hidden.clone().requires_grad_(), head.clone().requires_grad_()
    if "chunk_size" in how:
        loss = chunked_cross_entropy(x, weight, targets, **how)
    else:
        logits = x @ weight.T
        loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORE_INDEX)
        loss = with_z_loss(loss, logits, targets, how["z_loss"])
    (loss * 0.5).backward()
    return [loss.detach(), x.grad, weight.grad]  # type: ignore[list-item]


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("chunk_size", [1, 7, 100])
def test_a_loss_in_chunks_is_the_loss_of_the_whole(chunk_size: int, z_loss: float) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(20, 8, generator=generator), torch.randn(V, 8, generator=generator)
    targets = torch.randint(V, (20,), generator=generator)
    targets[3:6] = IGNORE_INDEX
    wanted = losses(hidden, head, targets, z_loss=z_loss)
    for got, want in zip(losses(hidden, head, targets, z_loss=z_loss, chunk_size=chunk_size), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_z_loss_shrinks_the_normalizer_and_does_not_show_in_the_loss() -> None:
    plain, pulled = (losses(torch.ones(1, 4), torch.ones(V, 4), torch.zeros(1).long(), z_loss=z) for z in (0.0, 1.0))
    assert plain[0] == pulled[0]
    log_z = 4 + math.log(V)  # all logits are 4, and d log(Z)^2 / dx = 2 log(Z) x the mean row of the head
    torch.testing.assert_close(pulled[1] - plain[1], torch.full((1, 4), 0.5 * 2 * log_z))


@pytest.mark.parametrize("recomputes", ["selective", "full"])
def test_recomputed_layers_have_the_same_gradients_bit_for_bit(recomputes: str) -> None:
    gradients = []
    for how in ("none", recomputes):
        model = make()
        for block in model.model.layers:
            prepare_block(block, how, compiled=False)
        model(tokens(), tokens(), reduction="sum").backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("recomputes", ["none", "selective"])
def test_compiled_layers_share_one_graph_and_give_the_same(recomputes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced, but not handed to a C++ compiler, which would take a minute."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()
    gradients = []
    for compiled in (False, True):
        model = make(num_hidden_layers=3, num_key_value_heads=None)
        for block in model.model.layers:
            prepare_block(block, recomputes, compiled=compiled)
        model(tokens(), tokens(), reduction="sum").backward()
        gradients.append([p.grad for p in model.parameters()])
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)
