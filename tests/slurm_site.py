"""A cluster file, a config, a small Slurm on PATH and the product's command line on them: what Slurm tests share."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import fake_slurm

from pipeline.run.folder import Run

Pipeline = Callable[..., subprocess.CompletedProcess[str]]

CLUSTER = """\
scheduler: slurm
gpus_per_node: 8
gpu_type: h100
sbatch: {partition: gpu, account: lm}
stages: {tokenize: {sbatch: {partition: cpu}}}
"""


class Site:
    """A cluster file, a config, the fake Slurm, and the product's command line on them."""

    def __init__(self, tmp_path: Path, micro: Path, pipeline: Pipeline) -> None:
        self.folder = tmp_path / "slurm"
        self.changes = fake_slurm.install(self.folder)
        self.cluster = tmp_path / "ours.yaml"
        self.cluster.write_text(CLUSTER)
        self.micro, self.pipeline, self.run = micro, pipeline, Run(tmp_path / "runs" / "micro")

    def submit(self, *words: str, **changes: str) -> subprocess.CompletedProcess[str]:
        return self.pipeline(
            "submit", self.micro, "--cluster", self.cluster, *words, **(self.changes | changes)
        )  # fmt: skip

    def verb(self, *words: object) -> subprocess.CompletedProcess[str]:
        return self.pipeline(*words, **self.changes)

    @property
    def queue(self) -> dict[str, dict]:
        return fake_slurm.read(self.folder)

    def by_name(self) -> dict[str, dict]:
        return {job["name"].removeprefix("micro-"): job | {"id": job_id} for job_id, job in self.queue.items()}

    def set(self, name: str, state: str, **changes: object) -> None:
        self.set_id(self.by_name()[name]["id"], state, **changes)

    def set_id(self, job_id: str, state: str, **changes: object) -> None:
        fake_slurm.set_state(self.folder, job_id, state, **changes)
