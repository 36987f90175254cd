"""What a checkpoint of a training holds: the tensors of model and optimizers by name, and the optimizers' settings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

MODEL = "model."
OPTIMIZER = "optimizer."
GROUPS = "param_groups"


def training_state(model: nn.Module, optimizers: list[Optimizer]) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Return the tensors themselves, not copies, named by parameter without wrappers' prefixes, and the settings."""
    state = get_optimizer_state_dict(model, optimizers)
    tensors = {MODEL + name: tensor for name, tensor in get_model_state_dict(model).items()}
    by_parameter: dict[str, Any] = state["state"]  # type: ignore[assignment]
    for parameter, values in by_parameter.items():
        tensors |= {f"{OPTIMIZER}{parameter}.{key}": value for key, value in values.items()}
    if strangers := [name for name, value in tensors.items() if not torch.is_tensor(value)]:
        raise TypeError(f"not tensors, and so not part of a checkpoint: {strangers}")
    return tensors, state[GROUPS]  # type: ignore[return-value]


def restore_settings(model: nn.Module, optimizers: list[Optimizer], stored: list[dict[str, Any]]) -> None:
    """Give the optimizers the settings (learning rates and so on) that a checkpoint has for them."""
    state = get_optimizer_state_dict(model, optimizers)
    groups: list[dict[str, Any]] = state[GROUPS]  # type: ignore[assignment]
    settings = {name: group for group in stored for name in group["params"]}
    # Joined by parameter: the order of groups is the optimizer's own affair.
    for group in groups:
        for name in group["params"][:1]:
            group |= {key: _like(group.get(key), value) for key, value in settings[name].items() if key != "params"}
    set_optimizer_state_dict(model, optimizers, state)


def _like(present: Any, stored: Any) -> Any:
    """Turn a list back into a tuple where it was one: JSON has lists only."""
    return tuple(stored) if isinstance(present, tuple) and isinstance(stored, list) else stored
