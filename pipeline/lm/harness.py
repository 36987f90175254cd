"""A task of lm-evaluation-harness, on the model as others load it: exported, then read by transformers.

The harness is an extra (lm-eval) and has its own idea of batches: a task is one Unit.
"""

from __future__ import annotations

import hashlib
import math
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pipeline.errors import UserError
from pipeline.lm.evaluation import Poll, Values
from pipeline.lm.export import export_model
from pipeline.lm.hardware import Hardware
from pipeline.lm.model import Transformer
from pipeline.lm.tokenizer import Tokenizer

METRICS = ("acc_norm", "acc", "exact_match", "f1", "bits_per_byte")  # the first that a task has is its Score
MISSING = (
    "evaluate.benchmarks: {name} is of the kind lm_eval, and the package lm-eval is not installed where stages run; "
    "install it there: pip install 'lm-eval[hf]>=0.4.5,<0.5'"
)


def folder_digest(path: Path | None) -> str:
    """Hash names and bytes of all files in a folder of tasks, whose YAML calls Python and reads what it will."""
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path else []:
        if file.is_file() and "__pycache__" not in file.parts:
            content = file.read_bytes()
            digest.update(f"{file.relative_to(path or file)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


class HarnessTask:
    """One task, by its name; `path` is a folder of tasks, which are code, or None for the harness's own."""

    def __init__(self, name: str, path: Path | None, tokenizer: Tokenizer, *, size: int, batch_size: int) -> None:
        try:
            version = metadata.version("lm-eval")
        except metadata.PackageNotFoundError:
            raise UserError(MISSING.format(name=name)) from None
        self.name, self.path, self.tokenizer, self.size, self.batch_size = name, path, tokenizer, size, batch_size
        digest = folder_digest(path)
        self.batches = 1
        self.settings = {"task": name, "lm_eval": version, "yaml": digest, "size": size}
        task = hashlib.sha256(f"{name} {version} {digest}".encode())  # the data itself is the harness's
        self.about: dict[str, Any] = {"lm_eval": version, "content_sha256": task.hexdigest()}

    def score(self, model: Transformer, hardware: Hardware, batches: range, poll: Poll) -> Values:
        """Return the task's Score by the name of its metric, and its standard error, -1 where the harness has none."""
        poll()
        with TemporaryDirectory() as folder:
            export_model(model, self.tokenizer, Path(folder), "fp32")
            found = self._evaluate(folder, hardware)
        for metric in METRICS:
            for key, value in found.items():
                if key.split(",")[0] == metric and isinstance(value, int | float) and math.isfinite(value):
                    error = found.get(key.replace(metric, f"{metric}_stderr", 1))
                    if not isinstance(error, int | float) or not math.isfinite(error):
                        error = -1.0
                    return {metric: [float(value)], "error": [float(error)]}
        raise UserError(
            f"lm_eval task {self.name}: none of {', '.join(METRICS)} is among its metrics: {sorted(found)}; "
            "name another task in evaluate.benchmarks"
        )

    def _evaluate(self, folder: str, hardware: Hardware) -> dict[str, Any]:
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager

        manager = TaskManager(include_path=str(self.path) if self.path else None)
        if self.name not in manager.all_tasks:
            where = f"in {self.path} or " if self.path else ""
            raise UserError(
                f"lm_eval task {self.name}: there is none of this name {where}in lm-eval itself; mend the name"
            )
        arguments = {"pretrained": folder, "dtype": "float32", "max_length": self.size}
        results = simple_evaluate(
            model="hf", model_args=arguments, tasks=[self.name], task_manager=manager, batch_size=self.batch_size,
            device=hardware.device, log_samples=False,
        )  # fmt: skip
        return dict(results["results"][self.name])
