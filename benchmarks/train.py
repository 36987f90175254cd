# ruff: noqa: E402
"""Train a 13.8M model on the CPU beside transformers, litgpt and a nanoGPT written anew: tokens/s, and time to a loss.

`nox -s bench -- train [--mode speed|loss] [--rounds N] [--seconds S] [--threads N] [--no-compile]`. Every way in a
fresh process, in turn, in bf16, eager and compiled; transformers and litgpt in an environment of their own. MFU is
against the bf16 product measured in the same round. The first steps of all rounds but the first find the compiler's
cache: that is a restart. `--mode loss`: on the default corpus, the seconds until ours has
the loss that the nanoGPT with AdamW has after S seconds (300), told it may take half of them. Ends with one JSON line
per figure; a ratio above 1 is in our favour.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT))

from benchmarks.parts.cache import CACHE, environment

PEERS = ("nanoGPT", "transformers", "litgpt")
PACKAGES = ("torch==2.13.0", "numpy", "transformers>=5,<6", "litgpt>=0.5,<0.6")
CONFIG = "name: train-bench\ndata: python-stdlib\ntokenize: {vocab_size: 8192, validation_fraction: 0.06}\n"


def run_way(python: str, way: str, **wanted: Any) -> dict[str, Any] | None:
    """Run one way in a process of its own; None where it fails."""
    words = [python, str(PROJECT / "benchmarks" / "parts" / "train_way.py"), way, json.dumps(wanted)]
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(CACHE / "inductor"), "OMP_NUM_THREADS": str(wanted["threads"])}
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    if done.returncode:
        print(f"{way} failed:\n{done.stderr[-2000:]}", file=sys.stderr, flush=True)
        return None
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def speeds(options: argparse.Namespace, pythons: dict[str, str]) -> list[dict[str, Any]]:
    """Measure all ways in turn; the order changes with every round."""
    modes = [False] if options.no_compile else [False, True]
    order = [(way, compiled) for compiled in modes for way in pythons]
    found: dict[tuple[str, bool], list[dict[str, Any]]] = {}
    for number in range(options.rounds):
        peak = run_way(sys.executable, "peak", seconds=3.0, threads=options.threads)
        assert peak is not None
        print(f"round {number}: a bf16 product makes {peak['peak'] / 1e9:.0f} GFLOP/s", flush=True)
        start = number * 3 % len(order)
        for way, compiled in order[start:] + order[:start]:
            result = run_way(
                pythons[way], way, mode="speed", compiled=compiled, seconds=options.seconds, threads=options.threads
            )
            if result is None:
                continue
            result["mfu"] = result["flops"] / peak["peak"]
            found.setdefault((way, compiled), []).append(result)
            print(
                f"  {way:14} {'compiled' if compiled else 'eager':8} {result['tokens_per_s']:7,.0f} tokens/s  MFU "
                f"{result['mfu']:.1%}  {result['tokens_per_cpu_s']:7,.0f} tokens per CPU second  first step "
                f"{result['first_step_s']:.1f} s  {result['parameters'] / 1e6:.2f}M parameters", flush=True,
            )  # fmt: skip
    return [figure for compiled in modes for figure in compare(found, compiled)] + restarts(found)


def restarts(found: dict[tuple[str, bool], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Compare the first compiled steps of processes that find what a former one has compiled."""
    times = {
        way: statistics.median(result["first_step_s"] for result in results[1:])
        for (way, compiled), results in found.items()
        if compiled and len(results) > 1
    }
    peers = {way: seconds for way, seconds in times.items() if way in PEERS}
    if not peers or "ours, AdamW" not in times:
        return []
    best, ours_s = min(peers, key=peers.__getitem__), times["ours, AdamW"]
    return [
        {
            "benchmark": "train compiled, first step of a restart", "ours": round(ours_s, 2), "unit": "s",
            "best_peer": round(peers[best], 2), "peer": best, "ratio": round(peers[best] / ours_s, 3),
            "runs": len(found["ours, AdamW", True]) - 1,
        }
    ]  # fmt: skip


def compare(found: dict[tuple[str, bool], list[dict[str, Any]]], compiled: bool) -> list[dict[str, Any]]:
    how = "compiled" if compiled else "eager"
    figures = []
    for key, unit in (("tokens_per_s", "tokens/s"), ("tokens_per_cpu_s", "tokens per CPU second")):
        medians = {
            way: statistics.median(result[key] for result in results)
            for (way, mode), results in found.items()
            if mode == compiled
        }
        peers = {way: value for way, value in medians.items() if way in PEERS}
        for way in medians.keys() - peers.keys() if peers else ():
            best = max(peers, key=peers.__getitem__)
            figures.append(
                {
                    "benchmark": f"train {how}, {way}", "ours": round(medians[way]), "unit": unit,
                    "best_peer": round(peers[best]), "peer": best, "ratio": round(medians[way] / peers[best], 3),
                    "runs": len(found[way, compiled]),
                }
            )  # fmt: skip
    return figures


def time_to_loss(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train the baseline for `seconds`, ours for half of them; find when ours has the baseline's last loss."""
    seconds = options.seconds
    common = {"mode": "loss", "compiled": not options.no_compile, "threads": options.threads, "data": str(corpus())}
    times, losses = [], []
    for _ in range(options.rounds):
        baseline = run_way(sys.executable, "nanoGPT", seconds=seconds, **common)
        ours = run_way(sys.executable, "ours", seconds=seconds / 2, **common)
        assert baseline is not None
        assert ours is not None
        target = baseline["curve"][-1][1]
        losses.append((target, ours["curve"][-1][1]))
        reached = next((at for at, loss in ours["curve"] if loss <= target), None)
        times.append(reached)
        print(f"nanoGPT with AdamW: {baseline['steps']} steps, {baseline['curve'][-1]}; ours: {ours['steps']} steps, ")
        print(f"  {ours['curve']}\n  reached after {reached} s", flush=True)
    if any(at is None for at in times):
        print("ours did not reach it in half the time")
        return []
    ours_s = statistics.median(times)
    return [
        {
            "benchmark": f"time to the loss of AdamW after {seconds:g} s", "ours": ours_s, "unit": "s",
            "best_peer": seconds, "peer": "nanoGPT with AdamW", "ratio": round(seconds / ours_s, 3), "runs": len(times),
        }
    ]  # fmt: skip


def corpus() -> Path:
    """Return the folder of tokens of the default corpus, made once."""
    folder = CACHE / "train"
    data = folder / "train-bench" / "data"
    if not (data / "index.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(f"{CONFIG}runs_dir: {folder}\n")
        words = ["-m", "pipeline", "submit", str(folder / "config.yaml"), "--cluster", "local", "--only", "tokenize"]
        subprocess.run([sys.executable, *words], check=True, cwd=PROJECT, stdout=sys.stderr)
    return data


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=["speed", "loss"], default="speed")
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--seconds", type=float, default=None, help="of a measurement, or the baseline's training")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-compile", action="store_true")
    options = parser.parse_args()
    options.rounds = options.rounds or (3 if options.mode == "speed" else 1)
    options.seconds = options.seconds or (20.0 if options.mode == "speed" else 300.0)
    if options.mode == "loss":
        figures = time_to_loss(options)
    else:
        python = environment("train-peers", *PACKAGES)
        pythons = {"ours": sys.executable, "ours, AdamW": sys.executable, "nanoGPT": sys.executable}
        figures = speeds(options, pythons | ({"transformers": str(python), "litgpt": str(python)} if python else {}))
    for figure in figures:
        print(json.dumps(figure))
    return 0


if __name__ == "__main__":
    sys.exit(main())
