"""Is a Stage's output already there? The one place that decides what a second run may skip."""

from __future__ import annotations

from pathlib import Path

from pipeline.config.schema import Config
from pipeline.evaluation.scoring import is_scored
from pipeline.files import read_json
from pipeline.inference.samples import settings_digest
from pipeline.run.folder import Run


def is_complete(run: Run, config: Config, stage: str) -> bool:
    """Tell whether `stage` has nothing left to do. Outputs appear by rename, so being there is being whole."""
    if stage == "preflight":  # nodes may have broken since
        return False
    return {"tokenize": _tokenize, "pretrain": _pretrain, "evaluate": _evaluate, "inference": _inference}[stage](
        run, config
    )


def _tokenize(run: Run, config: Config) -> bool:
    return run.read_index() is not None and run.tokenizer.is_file()


def _pretrain(run: Run, config: Config) -> bool:
    return config.pretrain.max_steps in run.checkpoint_steps()


def steps_to_evaluate(run: Run, config: Config) -> list[int]:
    """List the steps whose checkpoints evaluate.checkpoints asks for, ascending."""
    steps = run.checkpoint_steps()
    wanted = config.evaluate.checkpoints
    if "all" in wanted:
        return steps
    chosen = (steps[:1] if "first" in wanted else []) + (steps[-1:] if "last" in wanted else [])
    return sorted(set(chosen))


def awaits_evaluation(run: Run, config: Config, step: int) -> bool:
    """Tell whether a checkpoint must stay because all are to be scored and this one is not yet."""
    if "all" not in config.evaluate.checkpoints:
        return False
    return not all(is_scored(run, step, benchmark.name) for benchmark in config.evaluate.benchmarks)


def _evaluate(run: Run, config: Config) -> bool:
    steps = steps_to_evaluate(run, config)
    scored = all(is_scored(run, step, benchmark.name) for step in steps for benchmark in config.evaluate.benchmarks)
    return _pretrain(run, config) and scored and isinstance(read_json(run.compressors), dict)


def _inference(run: Run, config: Config) -> bool:
    step = config.pretrain.max_steps
    if not (_pretrain(run, config) and run.samples(step).is_file()):
        return False
    if config.inference.prompts_file and not Path(config.inference.prompts_file).is_file():
        return True  # what was made of it stays
    made_with = (read_json(run.samples_record(step)) or {}).get("settings")
    return made_with in (None, settings_digest(config.inference))  # prompts and settings may be changed: then anew
