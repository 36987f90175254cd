"""Make a plausible finished Run without training one; the tests then take away or spoil what they are about."""

from __future__ import annotations

import hashlib
import json
import math
import socket
from pathlib import Path
from typing import Any

from pipeline.files import append_line, write_json, write_text
from pipeline.run.folder import Run

START = 1_760_000_000.0
MAX_STEPS = 900
TOKENS_PER_STEP = 16 * 512
SPEED = 42_000.0  # tokens/s
STEP_SECONDS = TOKENS_PER_STEP / SPEED
HOSTILE = "</script><script>alert('x')</script> & <b>\x1b[31m"

TOKENIZER = "no real model"
FINGERPRINT = hashlib.sha256(TOKENIZER.encode()).hexdigest()

CONFIG = f"""name: example
seed: 1
data:
  - path: python-stdlib
pretrain:
  max_steps: {MAX_STEPS}
  global_batch_size: 16
  sequence_length: 512
evaluate:
  checkpoints: [first, last]
inference:
  prompts: ["def fibonacci(n):"]
"""


def make_run(root: Path) -> Run:
    """Return a Run in which every Stage is complete and whose scheduler has ended."""
    run = Run(root)
    write_text(run.config, CONFIG)
    write_data(run)
    for step in (0, MAX_STEPS):
        write_json(run.checkpoint(step) / "manifest.json", {"step": step})
    for step in range(10, MAX_STEPS + 1, 10):
        append_line(run.metrics, metric(step))
    write_scores(run)
    run.samples(MAX_STEPS).parent.mkdir()
    append_line(run.samples(MAX_STEPS), sample("def fibonacci(n):", "\n    if n < 2:\n        return n\n", "stop"))
    append_line(run.samples(MAX_STEPS), sample("# " + HOSTILE, "\n# fine\n", "length"))
    write_events(run)
    write_jobs(
        run, [job(stage, str(at), at) for at, stage in enumerate(("tokenize", "pretrain", "evaluate", "inference"), 1)]
    )
    for at, stage in enumerate(("tokenize", "pretrain", "evaluate", "inference"), 1):
        write_text(run.log(stage, str(at), 0), f"{stage} begins\n{stage} ends\n")
        write_verdict(run, stage, str(at), "complete")
    record: dict[str, Any] = {
        "created": "2025-10-09T10:53:20+0200",
        "commit": "0123abcd",
        "python": "3.11.7",
        "torch": "2.13.0",
    }
    record |= {
        "host": "laptop",
        "seed": 1,
        "parameters": 1_830_528,
        "hardware": {"precision": "fp32", "compile": False},
    }
    write_json(run.record, record)
    return run


def metric(step: int, **changes: Any) -> dict[str, Any]:
    """Return a line of metrics.jsonl: a loss that falls, with noise that is the same each time."""
    loss = 3.1 + 5.2 * math.exp(-step / 90) - 0.9 * step / MAX_STEPS + 0.12 * math.sin(step * 12.9898)
    lr = 3e-3 * min(1.0, step / 50, (MAX_STEPS - step) / (0.3 * MAX_STEPS))
    record = {"step": step, "tokens": step * TOKENS_PER_STEP, "loss": loss, "lr": lr}
    record |= {"grad_norm": 0.6 + 2 * math.exp(-step / 60) + 0.2 * math.cos(step * 78.233), "mfu": None}
    record |= {"tokens_per_s": SPEED * (1 + 0.02 * math.sin(step)), "time": START + 30 + step * STEP_SECONDS}
    return record | changes


def write_data(run: Run) -> None:
    """Write data/index.json and a tokenizer of no use."""
    write_text(run.tokenizer, TOKENIZER)
    common = {"duplicates": 3, "bytes_per_token": 3.15, "longest_document": 102_400, "shards": []}
    train = {"documents": 771, "bytes": 11_402_113, "tokens": 3_621_006, **common}
    validation = {"documents": 43, "bytes": 752_224, "tokens": 239_804, **common}
    splits = {"train": train, "validation": validation}
    tokenizer = {"fingerprint": FINGERPRINT, "vocab_size": 4096, "eos_id": 1, "exact": True}
    train |= {"vocabulary_used": 3999, "document_lengths": [[1024, 300], [2048, 471]]}
    train |= {"token_frequencies": [[1, 90_000], [2, 50_000], [60, 2000], [3999, 1]]}
    read = {"files": 817, "records": 817, "empty": 3, "malformed": 0}
    write_json(
        run.index,
        {"format": 1, "dtype": "uint16", "tokenizer": tokenizer, "read": read, "in_both_splits": 0, "splits": splits},
    )


def write_scores(run: Run) -> None:
    """Write bits per byte of the first and the last checkpoint, and of the compressors."""
    for step, score in ((0, 4.02), (MAX_STEPS, 1.393)):
        record = {"benchmark": "bits_per_byte", "score": score, "unit": "bits/byte", "step": step, "seconds": 8.4}
        record |= {"nll": score * 752_224 * math.log(2), "tokens": 239_804, "bytes": 752_224}
        record |= {
            "perplexity_per_token": 2 ** (score * 752_224 / 239_804),
            "checkpoint": "x",
            "tokenizer": FINGERPRINT,
        }
        write_json(run.scores(step) / "bits_per_byte.json", record)
    compressors = {"gzip -9": 1.951, "bzip2 -9": 1.572, "xz -9": 1.541}
    write_json(run.compressors, {"bytes": 752_224, "bits_per_byte": compressors})


def sample(prompt: str, completion: str, finish_reason: str) -> dict[str, Any]:
    return {"prompt": prompt, "completion": completion, "finish_reason": finish_reason, "tokens": 24, "seconds": 0.4}


def write_events(run: Run) -> None:
    """Write the events of one undisturbed attempt of pretrain."""
    end = START + 40 + MAX_STEPS * STEP_SECONDS
    common = {"host": "laptop", "stage": "pretrain", "job_id": "2", "attempt": 0}
    for event, moment in (("start", START + 25), ("save", end - 1), ("complete", end)):
        append_line(
            run.events, {"time": moment, "event": event, **common, "step": 0 if event == "start" else MAX_STEPS}
        )


def job(stage: str, job_id: str, place: int = 1, state: str = "completed", **changes: Any) -> dict[str, Any]:
    """Return one record of jobs.json, of an attempt that took 25 s."""
    record = {"stage": stage, "segment": 0, "job_id": job_id, "attempt": 0, "state": state, "reason": ""}
    record |= {"log": f"logs/{stage}-{job_id}.0.log", "started": START + 25 * place, "ended": START + 25 * place + 25}
    return record | {"process": None} | changes


def write_jobs(run: Run, jobs: list[dict[str, Any]], **changes: Any) -> None:
    """Write jobs.json of a local scheduler that has ended: no process has that pid."""
    head = {"scheduler": "local", "host": socket.gethostname(), "pid": 2**22 + 1, "started": "1"}
    write_json(run.jobs, head | changes | {"jobs": jobs})


def write_verdict(run: Run, stage: str, job_id: str, verdict: str, reason: str = "", step: int | None = None) -> None:
    record = {"verdict": verdict, "reason": reason, "stage": stage, "step": step, "time": START + 60, "host": "laptop"}
    write_json(run.verdict(job_id, 0), record)


def torn(path: Path) -> None:
    """Cut a file in the middle, as a crash of the machine may."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def as_json(value: Any) -> Any:
    """Return `value` as a reader of its JSON sees it."""
    return json.loads(json.dumps(value, allow_nan=False))
