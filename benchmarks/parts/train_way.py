"""Train one way in this process and print what came of it as JSON: `train_way.py WAY JSON`, for benchmarks/train.py.

All ways have 6 layers of width 384 with 6 heads, 8,192 pieces, tied embeddings, bf16 by autocast, clipping at 1.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT))

WIDTH, LAYERS, HEADS, VOCABULARY, LENGTH, ROWS = 384, 6, 6, 8192, 256, 8
TOKENS = ROWS * LENGTH  # of a step


class Block(nn.Module):
    """A layer of GPT-2: LayerNorm, GELU of four widths."""

    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = (part.view(B, T, HEADS, -1).transpose(1, 2) for part in self.qkv(self.ln1(x)).split(D, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, D))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class GPT(nn.Module):
    """What nanoGPT trains, written anew: learned positions, GELU, LayerNorm, tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(
                    p, std=0.02 / (math.sqrt(2 * LAYERS) if name.endswith(("out.weight", "down.weight")) else 1)
                )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.table.weight)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=1024, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, max_position_embeddings=LENGTH, tie_word_embeddings=True, use_cache=False,
        attn_implementation="sdpa",
    )  # fmt: skip

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = LlamaForCausalLM(config)

        def forward(self, ids: Tensor) -> Tensor:
            return self.inner(ids).logits

    return Logits()


def litgpt() -> nn.Module:
    from litgpt.config import Config
    from litgpt.model import GPT as LitGPT

    model = LitGPT(
        Config(
            block_size=LENGTH,
            vocab_size=VOCABULARY,
            padded_vocab_size=VOCABULARY,
            n_layer=LAYERS,
            n_head=HEADS,
            n_embd=WIDTH,
            intermediate_size=1024,
            rotary_percentage=1.0,
            parallel_residual=False,
            bias=False,
            norm_class_name="RMSNorm",
            mlp_class_name="LLaMAMLP",
        )
    )
    for p in model.parameters():
        if p.dim() == 2:
            nn.init.normal_(p, std=0.02)
    model.lm_head.weight = model.transformer.wte.weight
    return model


class Peer:
    """A plain loop around a model that returns logits, as the peers' own training scripts have it."""

    def __init__(self, model: nn.Module, *, compiled: bool, steps: int) -> None:
        self.model, self.steps, self.step = model, steps, 0
        self.parameters = sum(p.numel() for p in model.parameters())
        self.forward = torch.compile(model) if compiled else model
        matrices = [p for p in model.parameters() if p.dim() >= 2]
        others = [p for p in model.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)

    def losses(self, rows: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = self.forward(rows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())

    def train(self, rows: Tensor) -> None:
        self.step += 1
        share = min(1.0, self.step / 100)  # nanoGPT's schedule: warm-up, then a cosine to a tenth
        share *= 0.1 + 0.9 * (0.5 + 0.5 * math.cos(math.pi * min(1.0, self.step / self.steps)))
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-3 * share
        self.losses(rows).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class Ours:
    """The product's own stepper."""

    def __init__(self, *, compiled: bool, steps: int, threads: int, optimizer: str) -> None:
        from pipeline.config.schema import Config
        from pipeline.lm.hardware import Hardware
        from pipeline.lm.inject import Injector
        from pipeline.lm.ledger import Ledger
        from pipeline.lm.stepper import Stepper

        model = {"hidden_size": WIDTH, "intermediate_size": 1024, "num_hidden_layers": LAYERS}
        model |= {"num_attention_heads": HEADS, "qk_norm": optimizer == "muon"}
        pretrain: dict[str, Any] = {"global_batch_size": ROWS, "sequence_length": LENGTH, "max_steps": max(steps, 101)}
        pretrain |= {"optimizer": optimizer, "schedule": "linear", "warmup_steps": 50, "precision": "bf16"}
        pretrain |= {"learning_rate": 5e-3 if optimizer == "muon" else 1e-3, "muon_learning_rate": 2e-2}
        config = Config.model_validate(
            {"name": "bench", "tokenize": {"vocab_size": VOCABULARY}, "model": model, "pretrain": pretrain}
        )
        self.rows: Tensor | None = None
        nothing = Ledger(time.time(), lambda account: None)
        hardware = Hardware("cpu", "bf16", compiled, threads)
        self.stepper = Stepper(config, hardware, self, Injector(0, lambda *_, **__: None, ""), nothing)  # type: ignore[arg-type]
        self.parameters = sum(p.numel() for p in self.stepper.model.parameters())

    def batch(self, step: int, rank: int, world_size: int) -> np.ndarray:
        assert self.rows is not None
        return self.rows.numpy()

    def losses(self, rows: Tensor) -> Tensor:
        with self.stepper.hardware.autocast():
            return self.stepper.forward(rows[:, :-1], rows[:, 1:])

    def train(self, rows: Tensor) -> None:
        self.rows = rows
        self.stepper.make_step()


def make(way: str, wanted: dict[str, Any], steps: int) -> Peer | Ours:
    torch.manual_seed(0)
    if way.startswith("ours"):
        optimizer = "adamw" if way == "ours, AdamW" else "muon"
        return Ours(compiled=wanted["compiled"], steps=steps, threads=wanted["threads"], optimizer=optimizer)
    model = {"nanoGPT": GPT, "transformers": llama, "litgpt": litgpt}[way]()
    return Peer(model, compiled=wanted["compiled"], steps=steps)


def speed(way: str, wanted: dict[str, Any]) -> dict[str, Any]:
    """Measure tokens per second, by the wall and by this process's own time, and the first step."""
    rows = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    trained = make(way, wanted, 1000)
    began = time.perf_counter()
    trained.train(rows)
    first = time.perf_counter() - began
    for _ in range(2):
        trained.train(rows)
    steps, began, used = 0, time.perf_counter(), cpu_seconds()
    while time.perf_counter() - began < wanted["seconds"]:
        trained.train(rows)
        steps += 1
    wall, used = time.perf_counter() - began, cpu_seconds() - used
    flops = 6 * trained.parameters + 12 * LAYERS * WIDTH * LENGTH
    return {
        "way": way, "parameters": trained.parameters, "first_step_s": first, "tokens_per_s": steps * TOKENS / wall,
        "tokens_per_cpu_s": steps * TOKENS / used, "flops": steps * TOKENS / wall * flops,
    }  # fmt: skip


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def peak(seconds: float) -> float:
    """Measure the FLOP/s of a bf16 product, the best of a few."""
    a, b = (torch.randn(2048, 2048, dtype=torch.bfloat16) for _ in range(2))
    best, until = math.inf, time.perf_counter() + seconds
    while time.perf_counter() < until:
        began = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - began)
    return 2 * 2048**3 / best


def loss_curve(way: str, wanted: dict[str, Any]) -> dict[str, Any]:
    """Train for so many seconds on the corpus; return (seconds of training, loss of the validation text)."""
    from pipeline.lm.batches import Batches
    from pipeline.lm.shards import TokenShards

    data = Path(wanted["data"])
    batches = Batches(TokenShards(data, "train"), LENGTH, ROWS, 1)
    held_out = torch.from_numpy(Batches(TokenShards(data, "validation"), LENGTH, 128, 1).batch(0))
    probe, seconds = make(way, wanted, 1000), []
    for step in range(13):
        began = time.perf_counter()
        probe.train(torch.from_numpy(batches.batch(step)))
        seconds.append(time.perf_counter() - began)
    steps = max(20, int(wanted["seconds"] / float(np.median(seconds[3:]))))
    trained, spent, curve = make(way, wanted, steps), 0.0, []
    for step in range(steps):
        began = time.perf_counter()
        trained.train(torch.from_numpy(batches.batch(step)))
        spent += time.perf_counter() - began
        if (step + 1) % max(1, steps // 20) == 0 or step + 1 == steps:
            with torch.no_grad():
                loss = float(torch.stack([trained.losses(rows) for rows in held_out.split(ROWS)]).mean())
            curve.append((round(spent, 2), round(loss, 4)))
    return {"way": way, "steps": steps, "parameters": trained.parameters, "curve": curve}


if __name__ == "__main__":
    named, asked = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(asked["threads"])
    if named == "peak":
        print(json.dumps({"peak": peak(asked["seconds"])}))
    else:
        print(json.dumps(speed(named, asked) if asked["mode"] == "speed" else loss_curve(named, asked)))
