"""The optimizers and the learning-rate schedule."""

from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim import Muon

from pipeline.lm.model import Transformer
from pipeline.lm.muon import STACK, SharedMuon, orthogonalize, stacks
from pipeline.lm.optim import build_optimizers, learning_rate_scale, set_learning_rate


def make(optimizer: str, *, tied: bool = True) -> tuple[Transformer, list[torch.optim.Optimizer]]:
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    config: Any = SimpleNamespace(**shape, rope_theta=1e4, rms_norm_eps=1e-5, tie_word_embeddings=tied, qk_norm=True)
    model = Transformer(config, vocab_size=40, max_sequence_length=8)
    model.init_weights(0)
    pretrain: Any = SimpleNamespace(
        optimizer=optimizer,
        learning_rate=3e-3,
        muon_learning_rate=2e-2,
        muon_momentum=0.95,
        weight_decay=0.1,
        betas=(0.9, 0.95),
    )
    return model, build_optimizers(model, pretrain)


def train(model: Transformer, optimizers: list[torch.optim.Optimizer], steps: int = 1) -> None:
    ids = torch.randint(40, (2, 9), generator=torch.Generator().manual_seed(3))
    for _ in range(steps):
        model(ids[:, :-1], ids[:, 1:]).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def groups(model: Transformer, optimizers: list[torch.optim.Optimizer]) -> dict[str, tuple[str, float, float]]:
    """Return parameter name → (optimizer, base learning rate, weight decay)."""
    names = {p: name for name, p in model.named_parameters()}
    return {
        names[p]: (type(o).__name__, group["base_lr"], group["weight_decay"])
        for o in optimizers
        for group in o.param_groups
        for p in group["params"]
    }


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_every_parameter_has_one_optimizer(optimizer: str, tied: bool) -> None:
    model, optimizers = make(optimizer, tied=tied)
    owned = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    assert len(owned) == len(set(owned)) == len(list(model.parameters()))


def test_muon_takes_the_matrices_inside_layers() -> None:
    model, optimizers = make("muon", tied=False)
    for name, group in groups(model, optimizers).items():
        is_matrix = name.endswith("_proj.weight")
        assert group == (("SharedMuon", 2e-2, 0.1) if is_matrix else ("AdamW", 3e-3, 0.0)), name


def test_adamw_decays_matrices_only() -> None:
    model, optimizers = make("adamw", tied=False)
    for name, group in groups(model, optimizers).items():
        assert group == ("AdamW", 3e-3, 0.0 if "norm" in name else 0.1), name


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_step_is_deterministic_and_changes_everything(optimizer: str) -> None:
    before = make(optimizer)[0].state_dict()
    runs = [make(optimizer) for _ in range(2)]
    for run in runs:
        train(*run)
    for name, value in runs[0][0].state_dict().items():
        assert torch.equal(value, runs[1][0].state_dict()[name]), name
        assert not torch.equal(value, before[name]), name


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_the_state_dict_continues_exactly(optimizer: str) -> None:
    model, optimizers = make(optimizer)
    set_learning_rate(optimizers, 0.5)
    train(model, optimizers, steps=2)
    again, again_optimizers = make(optimizer)
    again.load_state_dict(model.state_dict())
    for new, old in zip(again_optimizers, optimizers, strict=True):
        new.load_state_dict(deepcopy(old.state_dict()))  # a copy: it would share the tensors
    train(model, optimizers)
    train(again, again_optimizers)
    for name, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


def test_cpu_muon_is_torch_muon_up_to_bf16() -> None:
    start, gradients = torch.randn(24, 16), [torch.randn(24, 16) for _ in range(3)]
    ends = []
    for kind in (SharedMuon, Muon):
        p = torch.nn.Parameter(start.clone())
        optimizer = kind([p], lr=0.02, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
        for gradient in gradients:
            p.grad = gradient.clone()
            optimizer.step()  # type: ignore[no-untyped-call]
        ends.append(p.detach())
    moved = (ends[1] - start).norm()
    assert (ends[0] - ends[1]).norm() < 0.02 * moved


def test_orthogonalize_brings_singular_values_near_1() -> None:
    for shape in ((12, 30), (30, 12)):
        values = torch.linalg.svdvals(orthogonalize(torch.randn(shape), (3.4445, -4.7750, 2.0315), 5))
        assert values.min() > 0.5
        assert values.max() < 1.3


def test_schedules() -> None:
    def scale(step: int, schedule: Any, **changes: Any) -> float:
        return learning_rate_scale(
            step,
            100,
            **{"warmup_steps": 10, "schedule": schedule, "decay_fraction": 0.2, "final_ratio": 0.1, **changes},
        )

    for schedule in ("wsd", "cosine", "linear", "constant"):
        assert [scale(s, schedule) for s in (0, 4, 9)] == [0.1, 0.5, 1.0]
        assert scale(10, schedule) == 1.0
    assert [scale(s, "wsd") for s in (50, 80, 100)] == [1.0, 1.0, pytest.approx(0.1)]
    assert scale(90, "wsd") == pytest.approx(0.55)
    assert scale(55, "linear") == pytest.approx(0.55)
    assert scale(55, "cosine") == pytest.approx(0.55)
    assert scale(30, "cosine") > scale(30, "linear")
    assert scale(100, "constant") == 1.0
    assert scale(1000, "linear") == pytest.approx(0.1)  # past the end
    assert scale(0, "wsd", warmup_steps=0) == 1.0
    assert 0 < scale(99, "linear", final_ratio=0.0) < 0.02  # the last step still moves


def test_set_learning_rate_scales_every_group_from_its_base() -> None:
    _, optimizers = make("muon")
    for factor in (0.5, 0.1):
        set_learning_rate(optimizers, factor)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                assert group["lr"] == group["base_lr"] * factor


def test_matrices_updated_together_move_as_alone() -> None:
    shapes = [(12, 30), (30, 12), (12, 12), (12, 30), (5, 7)]
    start = [torch.randn(shape) for shape in shapes]
    gradients = [torch.randn(shape) for shape in shapes]

    def moved(numbers: list[int]) -> list[torch.Tensor]:
        matrices = [torch.nn.Parameter(start[n].clone()) for n in numbers]
        for n, p in zip(numbers, matrices, strict=True):
            p.grad = gradients[n].clone()
        optimizer = SharedMuon(matrices, lr=0.1, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
        optimizer.step()
        return [p.detach() for p in matrices]

    alone = [moved([n])[0] for n in range(len(shapes))]
    torch.testing.assert_close(moved(list(range(len(shapes)))), alone)


def test_stacks_hold_one_shape_on_its_side_and_not_too_much() -> None:
    sizes = [(4, 6), (6, 4), (4, 4), (4, 6)]
    matrices = [torch.empty(size, device="meta") for size in sizes]
    assert [[tuple(m.shape) for m in stack] for stack in stacks(matrices)] == [[(4, 6), (6, 4), (4, 6)], [(4, 4)]]
    large = [torch.empty(STACK // 2, 1, device="meta") for _ in range(5)]
    assert [len(stack) for stack in stacks(large)] == [2, 2, 1]


def test_bf16_orthogonalizes_nearly_as_well() -> None:
    matrices = torch.randn(3, 24, 16)
    exact, rough = (orthogonalize(matrices, (3.4445, -4.7750, 2.0315), 5, bf16=bf16) for bf16 in (False, True))
    assert rough.dtype == torch.float32
    assert 0 < (exact - rough).norm() < 0.05 * exact.norm()
