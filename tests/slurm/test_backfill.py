"""Evaluation in the holes of a real schedule: before a large Job that waits, and without delaying it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from private_slurm import PrivateSlurm
from test_chain import PROJECT, Chain

from pipeline.config.load import load_run_config
from pipeline.files import read_json, write_text
from pipeline.run.job_ledger import read_ledger
from pipeline.slurm.window import unix_time

STEPS = (0, 10, 20, 30, 40, 50, 60)
CONFIG = """\
name: beside
runs_dir: {folder}/runs
threads: 1
data: {folder}/corpus/*.py
tokenize: {{vocab_size: 400, validation_fraction: 0.3}}
model: {{hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 2}}
pretrain: {{max_steps: 60, sequence_length: 64, warmup_steps: 2}}
inference: {{max_new_tokens: 8}}
evaluate: {{checkpoints: all, stride: 4, unit_seconds: 3, time: 5, most_jobs: 2}}
"""
CLUSTER = """\
scheduler: slurm
cpus_per_task: 4
sbatch: {mem: 2000M}
"""


class Beside(Chain):
    """A Run with tokens, and with checkpoints of random weights that appear when a test wants them."""

    def __init__(self, slurm: PrivateSlurm, folder: Path) -> None:
        super().__init__(slurm, folder, "beside")
        write_text(self.config, CONFIG.format(folder=folder))
        write_text(self.cluster, CLUSTER)
        (folder / "corpus").mkdir()
        for path in sorted((PROJECT / "pipeline" / "lm").glob("*.py"))[:24]:
            (folder / "corpus" / path.name).write_text(path.read_text())
        self.submit()
        slurm.run("scancel", *(self.job(stage) for stage in ("inference", "evaluate", "pretrain", "tokenize")))
        from pipeline.stages.tokenize import tokenize

        tokenize(self.run, load_run_config(self.run.config))

    def save(self, *steps: int) -> None:
        from pipeline.lm.model import Transformer
        from pipeline.lm.optim import build_optimizers
        from pipeline.lm.saver import Saver

        config = load_run_config(self.run.config)
        for step in steps:
            model = Transformer(config.model, config.tokenize.vocab_size, config.pretrain.sequence_length)
            model.init_weights(step)
            with Saver(self.run.checkpoints, {}) as saver:
                saver.save(step, model, build_optimizers(model, config.pretrain), {"step": step})

    def new_checkpoint(self) -> None:
        """Ask for evaluate Jobs as a pretrain Job's batch shell does when a checkpoint has appeared."""
        words = [sys.executable, "-m", "pipeline.evaluation.backfill", str(self.run.root)]
        subprocess.run(words, env=self.environment, timeout=60, check=True)

    def beside_jobs(self) -> list[tuple[float, float]]:
        """Return when the evaluate Jobs beside the chain that ran have started and ended."""
        times = [span(self.slurm, str(r.job_id)) for r in read_ledger(self.run) if r.role == "beside"]
        return [(start, end or 0.0) for start, end in times if start is not None and start < time.time()]

    def scored(self) -> bool:
        return all(self.run.score(step, "bits_per_byte").is_file() for step in STEPS)

    def unit_seconds(self) -> float:
        paths = [path for step in STEPS[1:] for path in self.run.slices(step, "bits_per_byte").glob("[0-9]*.json")]
        return sum(float(read_json(path)["seconds"]) for path in paths)


def span(slurm: PrivateSlurm, job: str) -> tuple[float | None, float | None]:
    known = slurm.job(job)
    return unix_time(known["StartTime"]), unix_time(known["EndTime"]) if known["JobState"] != "RUNNING" else None


@pytest.fixture
def beside(slurm: PrivateSlurm, tmp_path: Path) -> Beside:
    return Beside(slurm, tmp_path)


def test_checkpoints_are_scored_in_a_hole_and_the_large_job_is_not_late(
    beside: Beside, note: Callable[[str], None]
) -> None:
    slurm = beside.slurm
    beside.save(STEPS[0])
    beside.verb("submit", beside.run.root, "--only", "evaluate")  # from it start-up and speed are known
    slurm.wait_for(str(read_ledger(beside.run)[-1].job_id), "COMPLETED", timeout=120)
    beside.save(*STEPS[1:])
    blocker = slurm.submit("sleep 220", "--nodes=2", "--exclusive", "--time=4")
    slurm.wait_for(blocker, "RUNNING")
    large = slurm.submit("true", "--nodes=3", "--exclusive", "--time=10")
    beside.wait_for("a planned start", lambda: f"job {large}" in beside.verb("window", beside.run.root), 60)
    planned, asked = span(slurm, large)[0], time.time()
    assert planned is not None
    beside.new_checkpoint()
    # Where this machine is slow, not all fits into the hole: what is left follows after the large Job.
    done = lambda: beside.scored() or slurm.job(large)["JobState"] == "COMPLETED"  # noqa: E731
    beside.wait_for("Scores", done, planned - asked + 60)
    beside.wait_for("evaluate Jobs to end", lambda: all(end for _, end in beside.beside_jobs()), 60)
    slurm.run("scancel", blocker)
    slurm.wait_for(large, "COMPLETED", timeout=60)
    beside.wait_for("all Scores", beside.scored, 150)
    started = span(slurm, large)[0]
    assert started is not None
    assert started <= planned + 10  # the schedulers of this Slurm look every 2 s
    before = [(start, end) for start, end in beside.beside_jobs() if start < started]
    assert before
    assert all(end <= started for _, end in before)
    held, hole = sum(end - start for start, end in before), min(planned, started) - asked
    inside = beside.unit_seconds() / sum(end - start for start, end in beside.beside_jobs())
    note(f"{inside:.0%} of the evaluate Jobs' time is inside Units (goal 70 %)")
    note(f"{held / hole:.0%} of {hole:.0f} s on the idle node is used, by {len(before)} Jobs (goal 50 %)")
