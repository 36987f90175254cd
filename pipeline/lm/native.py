"""The forward pass in C, for inference on a CPU: compiled by the C compiler that is there, called through ctypes.

A row's logits do not depend on the rows beside it, to the bit: see native.c.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from pipeline.files import atomic_path
from pipeline.lm.engine import Engine, Part
from pipeline.lm.model import Transformer, head_size, kv_heads, rope_tables

SOURCE = Path(__file__).with_name("native.c")
FLAGS = ("-O3", "-march=native", "-shared", "-fPIC", "-Wno-psabi")
COMPILE_SECONDS = 120
LANES = 16
ROWS = 256  # tokens in one pass: enough that weights are read once for many, few enough to stay in the cache


def build(folder: Path) -> ctypes.CDLL | None:
    """Return the compiled library, made once in `folder` for each source, compiler and processor; None without one."""
    compiler = next((c for c in (os.environ.get("CC"), "cc", "gcc", "clang") if c and shutil.which(c)), None)
    if compiler is None:
        return None
    about = [SOURCE.read_text(encoding="utf-8"), compiler, *FLAGS, _processor()]
    path = folder / f"native-{hashlib.sha256(chr(0).join(about).encode()).hexdigest()[:16]}.so"
    if not path.is_file() and not (_compile(compiler, path, "-fopenmp") or _compile(compiler, path)):
        return None
    try:
        return ctypes.CDLL(str(path))
    except OSError:  # a folder that nothing may be run from
        return None


def _compile(compiler: str, path: Path, *more: str) -> bool:
    try:
        with atomic_path(path) as temporary:
            words = [compiler, *FLAGS, *more, "-o", str(temporary), str(SOURCE), "-lm"]
            subprocess.run(words, check=True, capture_output=True, timeout=COMPILE_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return False
    return True


def _processor() -> str:
    """Tell processors apart for which other code is made: a Run may move between nodes."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    return platform.machine() + next((line for line in lines if line.startswith(("flags", "Features"))), "")


class _Model(ctypes.Structure):
    _fields_ = [
        *[
            (name, ctypes.c_int32)
            for name in ("layers", "D", "F", "H", "K", "E", "V", "positions", "is_bf16", "threads")
        ],
        ("eps", ctypes.c_float),
        *[
            (name, ctypes.c_void_p)
            for name in ("embedding", "head", "norm", "cos", "sin", "matrices", "norms", "cache")
        ],
    ]


class _Batch(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_int32) for name in ("rows", "groups", "outputs")],
        *[(name, ctypes.c_void_p) for name in ("token", "position", "slot", "first", "output", "logits", "scratch")],
    ]


class NativeEngine(Engine):
    """The model's weights, packed for native.c, and a cache of `slots` texts."""

    def __init__(self, library: ctypes.CDLL, model: Transformer, slots: int, dtype: torch.dtype, threads: int) -> None:
        self.slots, self.vocab_size = slots, model.vocab_size
        self._library, self._dtype = library, dtype
        config, E = model.config, head_size(model.config)
        self._positions = _up(model.max_sequence_length)
        shape = (slots, config.num_hidden_layers, kv_heads(config), 2, self._positions * _up(E))
        self._cache = torch.zeros(shape)
        weight = model.model.embed_tokens.weight.detach()
        head = weight if model.lm_head is None else model.lm_head.weight.detach()
        cos, sin = (t[:, 0, : E // 2].contiguous() for t in _rope(model, self._positions))
        matrices = [pack(m.detach(), dtype) for layer in model.model.layers for m in _matrices(layer)]
        norms = [n for layer in model.model.layers for n in _norms(layer)]
        self._kept = [weight.to(dtype).contiguous(), pack(head, dtype), _float(model.model.norm.weight), cos, sin]
        self._arrays = _pointers(matrices), _pointers(norms)
        self._kept += [*matrices, *[norm for norm in norms if norm is not None], self._cache]
        self._model = _Model(
            config.num_hidden_layers, config.hidden_size, config.intermediate_size, config.num_attention_heads,
            kv_heads(config), E, self.vocab_size, self._positions, dtype == torch.bfloat16, self._threads(threads),
            config.rms_norm_eps, *[t.data_ptr() for t in self._kept[:5]],
            *[ctypes.addressof(array) for array in self._arrays], self._cache.data_ptr(),
        )  # fmt: skip
        library.scratch_floats.restype = ctypes.c_int64
        library.scratch_floats.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        size = library.scratch_floats(ctypes.byref(self._model), max(ROWS, slots))
        self._scratch = torch.zeros(size)

    def _threads(self, threads: int) -> int:
        return threads if self._library.has_threads() else 1

    def forward(self, parts: Sequence[Part]) -> Tensor:
        logits = torch.empty(len(parts), self.vocab_size)
        waiting: list[tuple[Part, int | None]] = []
        size, most = 0, max(ROWS, self.slots)
        for number, part in enumerate(parts):
            for at in range(0, len(part.ids), ROWS):
                piece = Part(part.slot, part.start + at, part.ids[at : at + ROWS])
                if size + len(piece.ids) > most or any(other.slot == part.slot for other, _ in waiting):
                    self._pass(waiting, logits)
                    waiting, size = [], 0
                waiting.append((piece, number if at + ROWS >= len(part.ids) else None))
                size += len(piece.ids)
        self._pass(waiting, logits)
        return logits

    def _pass(self, pieces: list[tuple[Part, int | None]], logits: Tensor) -> None:
        """Compute some pieces, each of another slot; those with a number have their logits written there."""
        if not pieces:
            return
        ends = [0, *accumulate(len(piece.ids) for piece, _ in pieces)]
        token = _ints([i for piece, _ in pieces for i in piece.ids])
        position = _ints([piece.start + i for piece, _ in pieces for i in range(len(piece.ids))])
        wanted = [(end - 1, number) for end, (_, number) in zip(ends[1:], pieces, strict=True) if number is not None]
        found = torch.empty(max(1, len(wanted)), self.vocab_size)
        slot, first, output = _ints([piece.slot for piece, _ in pieces]), _ints(ends), _ints([row for row, _ in wanted])
        arrays = [a.data_ptr() for a in (token, position, slot, first, output, found, self._scratch)]
        batch = _Batch(len(token), len(pieces), len(wanted), *arrays)
        self._library.forward(ctypes.byref(self._model), ctypes.byref(batch))
        if wanted:
            logits[[number for _, number in wanted]] = found[: len(wanted)]


def pack(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a matrix (N, K) as panels (N / 16, K, 16): 16 outputs' weights side by side, padded with zeros."""
    N, K = weight.shape
    padded = torch.zeros(_up(N), K, dtype=dtype)
    padded[:N] = weight
    return padded.view(-1, LANES, K).transpose(1, 2).contiguous()


def _matrices(layer: torch.nn.Module) -> list[Tensor]:
    attention, mlp = layer.self_attn, layer.mlp
    fused = torch.cat([p.weight for p in (attention.q_proj, attention.k_proj, attention.v_proj)])  # type: ignore[union-attr, misc]
    return [fused, attention.o_proj.weight, mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight]  # type: ignore[union-attr, list-item]


def _norms(layer: torch.nn.Module) -> list[Tensor | None]:
    attention = layer.self_attn
    own = [
        _float(getattr(attention, name).weight) if hasattr(attention, name) else None for name in ("q_norm", "k_norm")
    ]
    return [_float(layer.input_layernorm.weight), _float(layer.post_attention_layernorm.weight), *own]  # type: ignore[union-attr, arg-type]


def _rope(model: Transformer, positions: int) -> tuple[Tensor, Tensor]:
    return rope_tables(positions, head_size(model.config), model.config.rope_theta, torch.device("cpu"))


def _pointers(tensors: Sequence[Tensor | None]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*[None if t is None else t.data_ptr() for t in tensors])


def _float(tensor: Tensor) -> Tensor:
    return tensor.detach().float().contiguous()


def _ints(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _up(size: int) -> int:
    return -(-size // LANES) * LANES
