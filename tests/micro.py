"""A corpus and a config that train in seconds, and an environment to run them in; also for tests with a conftest of their own."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

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


def mind_signals() -> None:
    """Undo what `nohup` and a shell's `&` hand down: processes that ignore Ctrl-C, and all that they start."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR2):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def write_corpus(folder: Path, documents: int = 40) -> None:
    """Write small Python-like text files, always the same."""
    words = "def return import self value for in range if not None print open read write close list dict".split()
    random_words = random.Random(0)
    folder.mkdir(parents=True)
    for number in range(documents):
        lines = [" ".join(random_words.choices(words, k=6)) for _ in range(40)]
        (folder / f"{number:03}.txt").write_text("\n    ".join(lines) + "\n", encoding="utf-8")


def environment(**changes: str) -> dict[str, str]:
    """Return an environment in which `python -m pipeline` finds this checkout, and no Slurm variable."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PIPELINE_"))}
    return kept | {"PYTHONPATH": str(PROJECT), "COLUMNS": "120", "NO_COLOR": "1"} | changes
