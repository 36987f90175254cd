"""Time JSON lines to token shards on disk against datatrove, datasets.map and a loop like Megatron-LM's, interleaved.

`nox -s bench -- tokenization [--rounds N] [--megabytes N] [--processes N] [--model-type bpe|unigram] [--peers NAME]`.
The corpus is built from Debian's documentation packages, the tokenizers of 16,384 tokens are trained on it, and the
peers are installed from the package index into environments of their own: all once, in benchmarks/.cache. Ours is the
stage as it is, so it also checks, hashes and drops duplicates. Prints the rates by the clock, and by the CPU seconds
that were used (imports included, and not all of datatrove's), which a busy machine disturbs less. Ends with one JSON
line per model type; a ratio above 1 is in our favour.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.parts.cache import CACHE, environment
from benchmarks.parts.corpus import corpus
from pipeline.config.tokenize import TokenizeConfig
from pipeline.lm.tokenizer import train_tokenizer

SCRIPT = Path(__file__).resolve().parent / "parts" / "tokenize_ways.py"
VOCAB_SIZE = 16_384
PEERS = {
    "megatron": ("sentencepiece>=0.2,<0.3", "numpy"),
    "datatrove": ("datatrove>=0.10,<0.11", "orjson", "tokenizers", "xxhash", "sentencepiece>=0.2,<0.3", "numpy"),
    "datasets": ("datasets>=4,<6", "sentencepiece>=0.2,<0.3", "numpy"),
}
UNIGRAM_PEERS = ("megatron", "datasets")  # the `tokenizers` package gives other ids for unigram


def cut_corpus(megabytes: float) -> Path:
    """Write the first `megabytes` of the corpus, and a folder of its halves for who reads a file per task."""
    path = CACHE / f"corpus-{megabytes:g}.jsonl"
    if not path.is_file():
        lines, size = [], 0
        with corpus().open("rb") as file:
            for line in file:
                lines.append(line)
                size += len(json.loads(line)["text"].encode())
                if size >= megabytes * 1e6:
                    break
        halves = path.with_suffix("")
        halves.mkdir(exist_ok=True)
        for number in (0, 1):
            (halves / f"{number}.jsonl").write_bytes(b"".join(lines[number::2]))
        path.write_bytes(b"".join(lines))
    return path


def tokenizer(model_type: str, path: Path) -> Path:
    """Return a model trained on the corpus, made once."""
    model = CACHE / f"{model_type}-{VOCAB_SIZE}.model"
    if not model.is_file():
        config = TokenizeConfig.model_validate({"vocab_size": VOCAB_SIZE, "model_type": model_type})
        with path.open("rb") as file:
            print(train_tokenizer((json.loads(line)["text"].encode() for line in file), config, model))
    return model


def measure(way: str, python: Path, arguments: list[str], processes: int) -> tuple[float, float, int]:
    """Run one way once; return its seconds, those of all its CPUs, and the tokens that it made."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory(dir=CACHE) as output:
        words = [str(python), str(SCRIPT), way, *arguments, output, str(processes)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{way} failed:\n{done.stderr[-3000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    result = json.loads(done.stdout.splitlines()[-1])
    return result["seconds"], cpu, result["tokens"]


def compare(model_type: str, text: Path, options: argparse.Namespace) -> dict[str, object]:
    """Run all ways in turn, the order moving on with every round; return the figure."""
    size = sum(len(json.loads(line)["text"].encode()) for line in text.open("rb"))
    pythons = {"ours": Path(sys.executable)}
    for name in options.peers or (PEERS if model_type == "bpe" else UNIGRAM_PEERS):
        if python := environment(name, *PEERS[name]):
            pythons[name] = python
    arguments = [str(text), str(tokenizer(model_type, corpus()))]
    rates: dict[str, list[float]] = {way: [] for way in pythons}
    by_cpu: dict[str, list[float]] = {way: [] for way in pythons}
    ways = list(pythons)
    for number in range(options.rounds):
        for way in [*ways[number % len(ways) :], *ways[: number % len(ways)]]:
            seconds, cpu, tokens = measure(way, pythons[way], arguments, options.processes)
            rates[way].append(size / 1e6 / seconds)
            by_cpu[way].append(size / 1e6 / cpu)
            print(
                f"{model_type} round {number}  {way:10} {rates[way][-1]:6.1f} MB/s, {by_cpu[way][-1]:5.1f} MB per CPU "
                f"second, {tokens:,} tokens", flush=True
            )  # fmt: skip
    middle = {way: statistics.median(values) for way, values in rates.items()}
    peers = [way for way in ways if way != "ours"]
    best = max(peers, key=middle.__getitem__)
    for way in ways:
        cpu = statistics.median(by_cpu[way])
        print(f"{model_type}  {way:10} {middle[way]:6.1f} MB/s, {cpu:5.1f} MB per CPU second (medians)")
    return {
        "benchmark": f"tokenize {model_type}, {size / 1e6:.0f} MB, {options.processes} processes",
        "ours": round(middle["ours"], 2), "unit": "MB/s", "best_peer": round(middle[best], 2), "peer": best,
        "ratio": round(middle["ours"] / middle[best], 3), "runs": options.rounds,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=float, default=1000, help="of the corpus, which has 89")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--model-type", choices=["bpe", "unigram"], action="append")
    parser.add_argument("--peers", choices=list(PEERS), action="append", help="these only")
    options = parser.parse_args()
    if shutil.which("dpkg") is None:
        sys.exit("the corpus is built from Debian packages: apt-get and dpkg are needed")
    text = cut_corpus(options.megabytes)
    figures = [compare(model_type, text, options) for model_type in options.model_type or ["bpe", "unigram"]]
    for figure in figures:
        print(json.dumps(figure))


if __name__ == "__main__":
    main()
