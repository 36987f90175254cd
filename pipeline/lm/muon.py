"""Muon for weights that every rank has, and for sharded ones: each rank orthogonalizes its share of the matrices."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Muon

STACK = 1 << 24  # numbers that are orthogonalized together, 64 MB in fp32: large matrices need no company


class SharedMuon(Muon):
    """torch.optim.Muon (Jordan et al. 2024), with the same state dict, in three points another.

    Matrices of one shape are orthogonalized together, as one batch of products, the tall ones turned on their side. Of
    n ranks each orthogonalizes every n-th sharded matrix alone: it is gathered there and its update scattered, so that
    no rank repeats another's work. And `bf16` decides what the Newton-Schulz iteration is computed in on a CPU: without
    bf16 units it is emulated, at 0.8 GF/s instead of 56 on a Zen 3 core. On a GPU it is always bf16, as in torch.
    Always with Nesterov momentum and `match_rms_adamw`, as `build_optimizers` asks.
    """

    def __init__(self, *arguments: Any, bf16: bool = False, **keys: Any) -> None:
        super().__init__(*arguments, **keys)
        self._bf16 = bf16

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Make one update; there is no closure."""
        for group in self.param_groups:
            matrices = [p for p in group["params"] if p.grad is not None]
            for p in matrices:  # in their order, which is that of a checkpoint's bytes
                if "momentum_buffer" not in self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p.grad)
            if matrices and isinstance(matrices[0], DTensor):
                together = _rows(matrices[0]).ranks
                for start in range(0, len(matrices), together):
                    self._update_shared(matrices[start : start + together], group)
            else:
                for stack in stacks(matrices):
                    self._update_stack(stack, group)

    def _update_stack(self, matrices: list[Tensor], group: dict[str, Any]) -> None:
        """Update matrices that are alike but for their orientation."""
        directions = self._directions(matrices, group["momentum"])
        wide = torch.stack([d.T if _is_tall(d) else d for d in directions])
        updates = orthogonalize(wide, group["ns_coefficients"], group["ns_steps"], bf16=self._bf16).unbind()
        turned = [u.T if _is_tall(p) else u for p, u in zip(matrices, updates, strict=True)]
        _descend(matrices, turned, group)

    def _update_shared(self, matrices: list[Tensor], group: dict[str, Any]) -> None:
        """Update as many sharded matrices as there are ranks, or fewer."""
        directions = self._directions(matrices, group["momentum"])
        updates = _orthogonalize_shared([_rows(p) for p in matrices], directions, group, bf16=self._bf16)
        for p, update in zip(matrices, updates, strict=True):
            _descend([p], [update], group)

    def _directions(self, matrices: list[Tensor], beta: float) -> list[Tensor]:
        """Move the momenta on; return what is to be orthogonalized, of sharded matrices this rank's rows."""
        gradients = [local(p.grad) for p in matrices if p.grad is not None]
        momenta = [local(self.state[p]["momentum_buffer"]) for p in matrices]
        torch._foreach_lerp_(momenta, gradients, 1 - beta)
        return list(torch._foreach_lerp(gradients, momenta, beta))


def _descend(matrices: list[Tensor], updates: list[Tensor], group: dict[str, Any]) -> None:
    """Decay matrices of one shape, turned or not, and move them against their updates."""
    weights = [local(p) for p in matrices]
    torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
    torch._foreach_add_(weights, updates, alpha=-0.2 * math.sqrt(max(matrices[0].shape)) * group["lr"])


def stacks(matrices: list[Tensor]) -> list[list[Tensor]]:
    """Put matrices together that have one shape when they lie on their side, in their order, up to STACK numbers."""
    by_shape: dict[tuple[int, ...], list[list[Tensor]]] = {}
    for matrix in matrices:
        found = by_shape.setdefault(tuple(sorted(matrix.shape)), [])
        if not found or (len(found[-1]) + 1) * matrix.numel() > STACK:
            found.append([])
        found[-1].append(matrix)
    return [stack for found in by_shape.values() for stack in found]


def _is_tall(matrix: Tensor) -> bool:
    return matrix.shape[0] > matrix.shape[1]


def local(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor, as a view."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def orthogonalize(
    matrices: Tensor, coefficients: tuple[float, float, float], steps: int, *, bf16: bool = False
) -> Tensor:
    """Push the singular values of matrices (N, rows, columns), or of one, towards 1; return them in their format.

    By the quintic Newton-Schulz iteration, in bf16 if asked for and on a GPU.
    """
    a, b, c = coefficients
    x = matrices if matrices.ndim == 3 else matrices[None]
    tall = _is_tall(x[0])
    x = x.mT if tall else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    x = x.bfloat16() if bf16 or matrices.device.type != "cpu" else x
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).reshape(matrices.shape).to(matrices.dtype)


@dataclass(frozen=True)
class _Rows:
    """How the rows of a matrix are spread: in equal pieces, of which the last ranks may have less or nothing."""

    group: dist.ProcessGroup
    rows: int
    columns: int

    @property
    def ranks(self) -> int:
        return self.group.size()

    @property
    def piece(self) -> int:
        return -(-self.rows // self.ranks)

    def pad(self, part: Tensor) -> Tensor:
        """Return a rank's rows (piece, columns), with zeros where it has fewer."""
        padded = part.new_zeros(self.piece, self.columns)
        padded[: len(part)] = part
        return padded

    def cut(self, matrix: Tensor) -> list[Tensor]:
        """Return every rank's rows of a matrix, all padded to one size."""
        parts = [matrix[start : start + self.piece] for start in range(0, self.piece * self.ranks, self.piece)]
        return [self.pad(part) for part in parts]


def _rows(matrix: Tensor) -> _Rows:
    """Look up over which ranks rows are spread: the last dimension of the mesh, as parallel.py lays it out."""
    assert isinstance(matrix, DTensor)
    return _Rows(matrix.device_mesh.get_group(matrix.device_mesh.ndim - 1), *matrix.shape)


def _orthogonalize_shared(
    spread: list[_Rows], parts: list[Tensor], group: dict[str, Any], *, bf16: bool
) -> list[Tensor]:
    """Orthogonalize up to as many sharded matrices as there are ranks, each on one; return this rank's rows of each."""
    me, padded = spread[0].group.rank(), [rows.pad(part) for rows, part in zip(spread, parts, strict=True)]
    gathered = [torch.empty_like(padded[me]) for _ in range(spread[me].ranks)] if me < len(spread) else []
    _finish(
        dist.gather(part, gathered if owner == me else None, group=rows.group, group_dst=owner, async_op=True)
        for owner, (rows, part) in enumerate(zip(spread, padded, strict=True))
    )
    if gathered:
        matrix = torch.cat(gathered)[: spread[me].rows]
        update = orthogonalize(matrix, group["ns_coefficients"], group["ns_steps"], bf16=bf16)
        gathered = spread[me].cut(update)
    _finish(
        dist.scatter(part, gathered if owner == me else None, group=rows.group, group_src=owner, async_op=True)
        for owner, (rows, part) in enumerate(zip(spread, padded, strict=True))
    )
    return [whole[: len(part)] for whole, part in zip(padded, parts, strict=True)]


def _finish(works: Iterable[dist.Work | None]) -> None:
    """Begin all, then wait for all."""
    for work in list(works):
        if work is not None:
            work.wait()
