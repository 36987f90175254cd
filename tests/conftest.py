"""A corpus and a config that train in seconds, and the command line as a person uses it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes import fake as fake  # a fixture

PROJECT = Path(__file__).resolve().parent.parent

MICRO = """\
name: micro
runs_dir: {runs}
threads: 1
data: {corpus}
tokenize: {{vocab_size: 400, validation_fraction: 0.3}}
model: {{hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2}}
pretrain:
  max_steps: 20
  global_batch_size: 4
  micro_batch_size: 2
  sequence_length: 32
  warmup_steps: 2
  save_interval: 5
  log_interval: 2
inference: {{prompts: ["def ", "return "], max_new_tokens: 8}}
"""


def write_corpus(folder: Path, documents: int = 40) -> None:
    """Write small Python-like text files, always the same."""
    words = "def return import self value for in range if not None print open read write close list dict".split()
    random_words = random.Random(0)
    folder.mkdir(parents=True)
    for number in range(documents):
        lines = [" ".join(random_words.choices(words, k=6)) for _ in range(40)]
        (folder / f"{number:03}.txt").write_text("\n    ".join(lines) + "\n", encoding="utf-8")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text") / "corpus"
    write_corpus(folder)
    return folder


@pytest.fixture
def micro(tmp_path: Path, corpus: Path) -> Path:
    """Return the path of a config whose Run is tmp_path/runs/micro."""
    path = tmp_path / "micro.yaml"
    path.write_text(MICRO.format(runs=tmp_path / "runs", corpus=corpus), encoding="utf-8")
    return path


def environment(**changes: str) -> dict[str, str]:
    """Return an environment in which `python -m pipeline` finds this checkout, and no Slurm variable."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PIPELINE_"))}
    return kept | {"PYTHONPATH": str(PROJECT), "COLUMNS": "120", "NO_COLOR": "1"} | changes


@pytest.fixture
def pipeline(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs `python -m pipeline WORDS` in tmp_path and returns what came of it."""

    def run(*words: object, timeout: float = 120, **changes: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "pipeline", *map(str, words)],
            capture_output=True, text=True, cwd=tmp_path, env=environment(**changes), timeout=timeout, check=False,
        )  # fmt: skip

    return run
