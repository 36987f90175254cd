# ruff: noqa: E402
"""Time greedy generation on a CPU: ours, transformers, litgpt and a compiled loop like gpt-fast's, interleaved.

`nox -s bench -- generate [--rounds N] [--batches 1 16] [--threads 2]`. A Llama of 29M parameters (8 layers, width 512,
8,192 tokens) in bf16, prompts of 64 tokens, 128 new ones; random weights, which cost the same. Each engine is a process
of its own that is warmed up first; they take turns, so that a busy machine is busy for all. litgpt gets an environment
below benchmarks/.cache, because it and transformers need other versions of the same packages. A figure is tokens/s of
all new tokens over all the time, the reading of the prompts too; on a machine that has other work, tokens per second of
CPU time say more. Ends with one JSON line per figure; a ratio above 1 is in our favour.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.parts.cache import CACHE, environment

V, D, INNER, LAYERS, HEADS = 8192, 512, 1376, 8, 8
PROMPT, NEW, CONTEXT = 64, 128, 256
Run = Callable[[list[list[int]]], int]  # completes prompts, returns the new tokens


def prompts(batch: int) -> list[list[int]]:
    return torch.randint(2, V, (batch, PROMPT), generator=torch.Generator().manual_seed(0)).tolist()


# engines; each imports what it needs, for they run in different environments


def ours() -> Run:
    from pipeline.config.inference import InferenceConfig
    from pipeline.config.pretrain import ModelConfig
    from pipeline.lm.generation import Generator, Request
    from pipeline.lm.model import Transformer
    from pipeline.lm.native import NativeEngine, build

    size = ModelConfig(hidden_size=D, intermediate_size=INNER, num_hidden_layers=LAYERS, num_attention_heads=HEADS)
    model = Transformer(size, V, CONTEXT)
    model.init_weights(0)
    library = build(CACHE / "generate")
    assert library is not None, "this measures native.c, which needs a C compiler: cc, gcc or clang"
    engine = NativeEngine(library, model, 16, torch.bfloat16, torch.get_num_threads())
    config = InferenceConfig(max_new_tokens=NEW, temperature=0.0, batch_size=16)

    class Bytes:
        """A tokenizer whose end token never comes."""

        eos_id = -1

        def bytes_of(self, token: int) -> bytes:
            return b"x"

    def run(batch: list[list[int]]) -> int:
        requests = [Request(number, "", ids, 0) for number, ids in enumerate(batch)]
        return sum(c.tokens for c in Generator(engine, Bytes(), config, CONTEXT).run(requests))  # type: ignore[arg-type]

    return run


def transformers() -> Run:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=V, hidden_size=D, intermediate_size=INNER, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        max_position_embeddings=CONTEXT, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()

    def run(batch: list[list[int]]) -> int:
        ids = torch.tensor(batch)
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        return (out.shape[1] - PROMPT) * len(batch)

    return run


def litgpt() -> Run:
    from litgpt.config import Config
    from litgpt.model import GPT

    config = Config(
        block_size=CONTEXT, padded_vocab_size=V, vocab_size=V, n_layer=LAYERS, n_head=HEADS, n_embd=D,
        rotary_percentage=1.0, parallel_residual=False, bias=False, norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP", intermediate_size=INNER,
    )  # fmt: skip
    model = GPT(config).to(torch.bfloat16).eval()

    def run(batch: list[list[int]]) -> int:
        with torch.inference_mode():
            model.clear_kv_cache()
            model.set_kv_cache(len(batch), max_seq_length=CONTEXT, dtype=torch.bfloat16)
            places = torch.arange(CONTEXT)
            logits = model(torch.tensor(batch), places[:PROMPT])
            for at in range(PROMPT, PROMPT + NEW - 1):
                logits = model(logits[:, -1:].argmax(-1), places[at : at + 1])
            logits[:, -1:].argmax(-1)
        return NEW * len(batch)

    return run


class Block(nn.Module):
    """A layer with fused projections and a cache that never moves, so that one compiled graph serves every step."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(D) for _ in range(2))
        self.qkv, self.out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.gate, self.up = nn.Linear(D, INNER, bias=False), nn.Linear(D, INNER, bias=False)
        self.down = nn.Linear(INNER, D, bias=False)

    def forward(self, x: Tensor, at: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor, k: Tensor, v: Tensor) -> Tensor:
        B, T, _ = x.shape
        parts = self.qkv(self.norms[0](x)).view(B, T, 3, HEADS, D // HEADS).permute(2, 0, 3, 1, 4)
        query, key = (p * turn[0] + torch.cat((-p.chunk(2, -1)[1], p.chunk(2, -1)[0]), -1) * turn[1] for p in parts[:2])
        k[:, :, at], v[:, :, at] = key, parts[2]
        y = F.scaled_dot_product_attention(query, k, v, attn_mask=mask)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, D))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def compiled_loop() -> Run:
    blocks = nn.ModuleList(Block() for _ in range(LAYERS)).to(torch.bfloat16)
    table, norm = nn.Embedding(V, D).to(torch.bfloat16), nn.RMSNorm(D).to(torch.bfloat16)
    angle = torch.arange(CONTEXT)[:, None] * 10_000.0 ** -(torch.arange(0, D // HEADS, 2) / (D // HEADS))
    angle = torch.cat((angle, angle), -1)
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    causal = torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).tril()

    def forward(ids: Tensor, at: Tensor, caches: list[tuple[Tensor, Tensor]]) -> Tensor:
        x, turn, mask = table(ids), (cos[at], sin[at]), causal[at]
        for block, (k, v) in zip(blocks, caches, strict=True):
            x = block(x, at, turn, mask, k, v)
        return F.linear(norm(x[:, -1:]), table.weight).argmax(-1)

    step = torch.compile(forward, fullgraph=True, dynamic=False)

    def run(batch: list[list[int]]) -> int:
        with torch.inference_mode():
            shape = (len(batch), HEADS, CONTEXT, D // HEADS)
            caches = [tuple(torch.zeros(shape, dtype=torch.bfloat16) for _ in "kv") for _ in blocks]
            token = forward(torch.tensor(batch), torch.arange(PROMPT), caches)  # type: ignore[arg-type]
            for at in range(PROMPT, PROMPT + NEW - 1):
                token = step(token, torch.tensor([at]), caches)
        return NEW * len(batch)

    return run


ENGINES: dict[str, Callable[[], Run]] = {
    "ours": ours, "transformers": transformers, "litgpt": litgpt, "compiled loop": compiled_loop,
}  # fmt: skip


def work(name: str) -> None:
    """Complete as many prompts as each line of standard input says; answer with the seconds."""
    run = ENGINES[name]()
    for line in sys.stdin:
        batch = prompts(int(line))
        began, cpu = time.perf_counter(), time.process_time()
        tokens = run(batch)
        assert tokens == NEW * len(batch), f"{name} made {tokens} tokens"
        taken = {"wall": time.perf_counter() - began, "CPU": time.process_time() - cpu}
        print(json.dumps(taken), flush=True)


class Worker:
    """One engine in a process of its own."""

    def __init__(self, name: str, python: str, threads: int) -> None:
        variables = os.environ | {"OMP_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": "20000"}  # as Jobs have it
        self.name, words = name, [python, __file__, "--worker", name]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables)

    def seconds(self, batch: int) -> dict[str, float]:
        """Return the seconds that one batch takes, by the clock and of all processors."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(f"{batch}\n")
        self.process.stdin.flush()
        while True:  # a peer may talk on standard output
            line = self.process.stdout.readline()
            if not line:
                raise RuntimeError(f"{self.name} ended with exit code {self.process.wait()}")
            if line.startswith('{"wall"'):
                return dict(json.loads(line))

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(60)


def pythons() -> dict[str, str]:
    """Return the Python of each engine; litgpt, which needs an environment of its own, may be left out."""
    version = torch.__version__.partition("+")[0]
    litgpt = environment("litgpt", f"torch=={version}", "numpy", "litgpt")
    found = dict.fromkeys(ENGINES, sys.executable)
    return {name: python for name, python in (found | {"litgpt": str(litgpt or "")}).items() if python}


UNITS = {"wall": "tokens/s", "CPU": "tokens per second of CPU time"}


def figure(taken: dict[str, list[dict[str, float]]], batch: int, threads: int, clock: str, unit: str) -> dict[str, Any]:
    """Compare medians by one of the clocks."""
    rates = {name: batch * NEW / statistics.median(s[clock] for s in rounds) for name, rounds in taken.items()}
    best = max(rates.keys() - {"ours"}, key=rates.__getitem__)
    return {
        "benchmark": f"generate, 29M bf16, batch {batch}, {threads} threads", "ours": round(rates["ours"], 1),
        "unit": unit, "best_peer": round(rates[best], 1), "peer": best,
        "ratio": round(rates["ours"] / rates[best], 3), "runs": len(taken["ours"]),
    }  # fmt: skip


def measure(engines: dict[str, str], batches: list[int], rounds: int, threads: int) -> list[dict[str, Any]]:
    """Let the engines take turns; the order changes with every round."""
    workers = [Worker(name, python, threads) for name, python in engines.items()]
    figures = []
    for batch in batches:
        taken: dict[str, list[dict[str, float]]] = {worker.name: [] for worker in workers}
        for round_ in range(rounds + 1):  # the first is the warm-up
            for worker in [*workers[round_ % len(workers) :], *workers[: round_ % len(workers)]]:
                seconds = worker.seconds(batch)
                told = ", ".join(f"{batch * NEW / s:8.1f} tokens/s by {clock}" for clock, s in seconds.items())
                print(f"batch {batch:3}  round {round_}  {worker.name:14} {told}", flush=True)
                if round_:
                    taken[worker.name].append(seconds)
        figures += [figure(taken, batch, threads, clock, unit) for clock, unit in UNITS.items()]
    for worker in workers:
        worker.close()
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker)
        return 0
    for figure in measure(pythons(), options.batches, options.rounds, options.threads):
        print(json.dumps(figure))
    return 0


if __name__ == "__main__":
    sys.exit(main())
