"""The verb `export`: everything that can be checked without torch, then the program that does it."""

from __future__ import annotations

from pathlib import Path

from pipeline.config.load import load_run_config
from pipeline.errors import NotReadyError, UserError
from pipeline.run.folder import Run
from pipeline.submit.aside import run_aside


def export(path: Path, step: int | None, precision: str) -> int:
    """Write RUN/export of a step, by default the newest; return the exit code."""
    run = Run.open(path)
    if precision not in ("fp32", "bf16"):
        raise UserError(f"--precision {precision}: write fp32 or bf16")
    return run_aside(run, load_run_config(run.config), "export", [str(run.root), str(step_of(run, step)), precision])


def step_of(run: Run, step: int | None) -> int:
    """Return a step that has a checkpoint: the one asked for, or the newest."""
    steps = run.checkpoint_steps()
    if not steps:
        raise NotReadyError(f"{run.checkpoints}: no checkpoint yet; pretrain writes the first one")
    if step is None:
        return steps[-1]
    if step not in steps:
        there = ", ".join(map(str, steps[-8:]))
        raise UserError(f"step {step}: no checkpoint of it is there; there are {there}")
    return step
