"""Is a Stage's output already there? The one place that decides what a second run may skip.

An output is complete when it is whole and made of what is there now: text, tokens, weights, prompts, questions. What
an older version did not record is taken to be the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from pipeline.config.schema import Config
from pipeline.errors import NotReadyError
from pipeline.evaluation.scoring import is_scored, manifest_hash
from pipeline.files import sha256_file
from pipeline.inference.samples import settings_digest
from pipeline.run.folder import Run
from pipeline.run.inputs import are_bound, changed_inputs, check_inputs, fingerprint
from pipeline.run.records import Record, read_record
from pipeline.run.saves import check_checkpoints
from pipeline.run.steps import MANIFEST


class Completeness(StrEnum):
    """How far a Stage is. `NOTHING`: there was never anything to do it with, which is not that all is done."""

    COMPLETE = "complete"
    TO_DO = "to do"
    NOTHING = "nothing to do it with"


def completeness(run: Run, config: Config, stage: str) -> Completeness:
    """Tell how far `stage` is; evaluate and inference have nothing to work with before a checkpoint is there."""
    if is_complete(run, config, stage):
        return Completeness.COMPLETE
    if stage in ("evaluate", "inference") and not run.checkpoint_steps():
        return Completeness.NOTHING
    return Completeness.TO_DO


def check_state(run: Run, config: Config, stages: Sequence[str]) -> None:
    """Raise UserError where what a Run has made before does not let `stages` go on; asked before anything is queued.

    Its checkpoints are gone, its text has changed under a model, or there is nothing to evaluate or sample from.
    """
    if "pretrain" in stages:
        check_checkpoints(run)
    if {"tokenize", "pretrain"} & set(stages):
        check_inputs(run, config)
    elif any(completeness(run, config, stage) is Completeness.NOTHING for stage in stages):
        raise NotReadyError(f"{run.checkpoints}: no checkpoint is there yet; pretrain writes the first one")


def is_complete(run: Run, config: Config, stage: str) -> bool:
    """Tell whether `stage` has nothing left to do. Outputs appear by rename, so being there is being whole."""
    if stage == "preflight":  # nodes may have broken since
        return False
    return {"tokenize": _tokenize, "pretrain": _pretrain, "evaluate": _evaluate, "inference": _inference}[stage](
        run, config
    )


def _tokenize(run: Run, config: Config) -> bool:
    """Tell whether the tokens are there, are this config's, and are those of the text as it is, or of a model."""
    index = run.read_index()
    if index is None or not run.tokenizer.is_file():
        return False
    tokenizer = _mapping(index.get("tokenizer"))
    known: list[tuple[Any, Any]] = [
        (index.get("inputs"), fingerprint(config)),
        (tokenizer.get("vocab_size"), config.tokenize.vocab_size),
    ]
    if any(then is not None and then != now for then, now in known):
        return False
    if (then := tokenizer.get("fingerprint")) is not None and then != sha256_file(run.tokenizer):
        return False
    return are_bound(run) or not changed_inputs(run, config)


def _pretrain(run: Run, config: Config) -> bool:
    last = config.pretrain.max_steps
    return last in run.checkpoint_steps() and fits_tokens(run, last)


def fits_tokens(run: Run, step: int) -> bool:
    """Tell whether a checkpoint was trained on the tokens and with the tokenizer that are there now, if any are."""
    index, manifest = read_record(run.index), read_record(run.checkpoint(step) / MANIFEST)
    train = _mapping(_mapping(index.get("splits")).get("train"))
    known: list[tuple[Any, Any]] = [
        (manifest.get("tokenizer"), _mapping(index.get("tokenizer")).get("fingerprint")),
        (manifest.get("tokens"), tokens_digest(train["shards"]) if "shards" in train else None),
    ]
    return not any(None not in (then, now) and then != now for then, now in known)


def tokens_digest(shards: Any) -> str | None:
    """Hash the hashes of an index's shards, as the manifest of a checkpoint does; None for a list that has none."""
    try:
        hashes = json.dumps([shard["sha256"] for shard in shards])
    except (KeyError, TypeError):
        return None
    return hashlib.sha256(hashes.encode()).hexdigest()


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
    return not all(is_scored(run, step, benchmark) for benchmark in config.evaluate.benchmarks)


def _evaluate(run: Run, config: Config) -> bool:
    steps = steps_to_evaluate(run, config)
    if not steps or not _pretrain(run, config):
        return False
    scored = all(is_scored(run, step, benchmark) for step in steps for benchmark in config.evaluate.benchmarks)
    return scored and bool(read_record(run.compressors))


def _inference(run: Run, config: Config) -> bool:
    step = config.pretrain.max_steps
    if not (_pretrain(run, config) and run.samples(step).is_file()):
        return False
    record = read_record(run.samples_record(step))
    made_of, there = record.get("checkpoint"), manifest_hash(run, step)
    if made_of is not None and there and made_of != there:
        return False
    if config.inference.prompts_file and not Path(config.inference.prompts_file).is_file():
        return True  # what was made of it stays
    return record.get("settings") in (None, settings_digest(config.inference))  # may be changed: then anew


def _mapping(value: Any) -> Record:
    return value if isinstance(value, dict) else {}
