"""Time batches of pre-tokenized text against torch's DataLoader, litdata and MosaicML streaming, interleaved.

`nox -s bench -- batches [--rounds N] [--million-tokens N]`. In one process, warm page cache, 16 sequences of 512 tokens
a step as int64, shuffled; one epoch. Also the time to open 1,000 shards, and tokens per second of CPU time, which a
busy machine disturbs less. The peers are installed from the package index into environments of their own, once, in
benchmarks/.cache; who can't be installed here is left out. Ends with one JSON line per figure; a ratio above 1 is in
our favour.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.parts.batch_ways import make_shards
from benchmarks.parts.cache import CACHE, environment

SCRIPT = Path(__file__).resolve().parent / "parts" / "batch_ways.py"
TORCH = ("torch==2.13.0", "numpy")
PEERS = {"dataloader": TORCH, "litdata": (*TORCH, "litdata"), "streaming": (*TORCH, "mosaicml-streaming")}
OPEN_SHARDS = 1000


def measure(way: str, python: Path, folder: Path) -> dict[str, float]:
    """Run one way once; return its seconds to open, and its tokens per second of one epoch."""
    words = [str(python), str(SCRIPT), way, str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ChildProcessError(f"{way} failed: {done.stderr.strip().splitlines()[-1:]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def find_ways(one: Path) -> dict[str, Path]:
    """Return the Python of ours and of each peer that can be installed and runs here."""
    pythons = {"ours": Path(sys.executable)}
    for name, packages in PEERS.items():
        if python := environment(name, *packages):
            try:
                measure(name, python, one)
                pythons[name] = python
            except ChildProcessError as error:
                print(f"left out: {error}", flush=True)
    return pythons


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--million-tokens", type=float, default=22.3)
    options = parser.parse_args()
    one = make_shards(CACHE / f"shards-1-{options.million_tokens:g}", int(options.million_tokens * 1e6), 1)
    many = make_shards(CACHE / "shards-many", OPEN_SHARDS * 20_000, OPEN_SHARDS)
    pythons = find_ways(one)
    results: dict[str, list[dict[str, float]]] = {way: [] for way in [*pythons, "ours, 1,000 shards"]}
    ways = [(way, pythons[way], one) for way in pythons] + [("ours, 1,000 shards", pythons["ours"], many)]
    for number in range(options.rounds):
        for way, python, folder in [*ways[number % len(ways) :], *ways[: number % len(ways)]]:
            result = measure(way.split(",")[0], python, folder)
            results[way].append(result)
            rate, by_cpu = result["tokens_per_s"] / 1e6, result["tokens_per_cpu_s"] / 1e6
            opened = result["open_s"] * 1e3
            print(
                f"round {number}  {way:20} {rate:7.1f} Mtok/s, {by_cpu:7.1f} per CPU second, opened in {opened:.1f} ms",
                flush=True,
            )
    for figure in figures(results, list(pythons), options.rounds):
        print(json.dumps(figure))


def figures(results: dict[str, list[dict[str, float]]], ways: list[str], runs: int) -> list[dict[str, Any]]:
    """Make the figures: medians, and the ratio to the best peer."""
    rate = {way: statistics.median(result["tokens_per_s"] / 1e6 for result in results[way]) for way in results}
    opened = {way: statistics.median(result["open_s"] for result in results[way]) for way in results}
    peers = [way for way in ways if way != "ours"]
    best, quickest = max(peers, key=rate.__getitem__), min(peers, key=opened.__getitem__)
    many = "ours, 1,000 shards"
    return [
        {
            "benchmark": "batches", "ours": round(rate["ours"], 1), "unit": "Mtok/s", "best_peer": round(rate[best], 1),
            "peer": best, "ratio": round(rate["ours"] / rate[best], 3), "runs": runs,
        },
        {
            "benchmark": "batches, open 1,000 shards; the peer opens one file", "ours": round(opened[many], 4),
            "unit": "s", "best_peer": round(opened[quickest], 4), "peer": quickest,
            "ratio": round(opened[quickest] / opened[many], 3), "runs": runs,
        },
    ]  # fmt: skip


if __name__ == "__main__":
    main()
