"""Begin from the weights of a folder in Hugging Face's form, instead of random ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from pipeline.errors import UserError
from pipeline.inference.hugging_face import weight_files
from pipeline.lm.model import Transformer


@torch.no_grad()
def load_folder(folder: Path, model: Transformer) -> None:
    """Fill the model with the weights of such a folder; every rank of a sharded one keeps its part.

    Raises UserError with all that does not fit: names that are missing or left over, and shapes.
    """
    wanted = dict(model.named_parameters())
    files = weight_files(folder)
    problems, found = [], set()
    for path in files:
        with _open(path) as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                if name not in wanted:
                    problems += [] if _is_spare(name, wanted) else [f"{name} is in no place of the model"]
                    continue
                found.add(name)
                shape = tuple(file.get_slice(name).get_shape())
                if shape != tuple(wanted[name].shape):
                    problems.append(f"{name} is {list(shape)}, the model's {list(wanted[name].shape)}")
    problems += [f"{name} is missing" for name in wanted if name not in found]
    if problems:
        more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise UserError(f"pretrain.init_from: {folder} is not this model: {'; '.join(problems[:8])}{more}")
    for path in files:
        with _open(path) as file:
            for name in file.keys():  # noqa: SIM118
                if name in wanted:
                    _copy(wanted[name], file.get_tensor(name))


def _copy(parameter: Tensor, value: Tensor) -> None:
    value = value.to(device=parameter.device, dtype=parameter.dtype)
    if isinstance(parameter, DTensor):  # every rank reads the whole tensor and keeps its part
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(value)


def _is_spare(name: str, wanted: dict[str, Any]) -> bool:
    """Tell of a tensor that some write although it follows from others: a tied head, RoPE's frequencies."""
    return (name == "lm_head.weight" and name not in wanted) or name.endswith("rotary_emb.inv_freq")


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise UserError(f"pretrain.init_from: {path}: cannot be read: {error}") from error
