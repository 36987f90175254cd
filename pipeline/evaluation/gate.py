"""Gate rules: what a Score that is too bad sets off."""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.config.evaluate import GateRule
from pipeline.config.schema import Config
from pipeline.evaluation.score_table import best_of, better
from pipeline.run.folder import Run
from pipeline.run.records import Score, read_records, read_scores


def broken_rule(rule: GateRule, score: Score, earlier: Iterable[Score]) -> str:
    """Say how a Score breaks a rule, given those of earlier steps; nothing if it does not."""
    told = f"step {score.step}: {score.benchmark} is {score.score:.4f}"
    if rule.below is not None and score.score < rule.below:
        return f"{told}, under {rule.below:g}"
    if rule.above is not None and score.score > rule.above:
        return f"{told}, over {rule.above:g}"
    best = best_of(list(earlier))
    if rule.worse_than_best_by is None or best is None:
        return ""
    if better(best, score) and abs(score.score - best.score) > rule.worse_than_best_by:
        return f"{told}, {abs(score.score - best.score):.4f} worse than at step {best.step}"
    return ""


def apply_gate(run: Run, config: Config, step: int, benchmark: str) -> None:
    """Do what the rules say about a Score that was just written: an event for each, once, and maybe the stop file."""
    scores = [score for score in read_scores(run) if score.benchmark == benchmark]
    score = next((score for score in scores if score.step == step), None)
    if score is None:
        return
    known = {str(event.get("reason")) for event in read_records(run.events) if event.get("event") == "gate"}
    for rule in config.evaluate.gate:
        if rule.benchmark != benchmark:
            continue
        reason = broken_rule(rule, score, [other for other in scores if other.step < step])
        if not reason or reason in known:  # merged a second time by another Job
            continue
        print(f"gate: {reason}")
        run.event("gate", step=step, benchmark=benchmark, reason=reason, action=rule.action)
        if rule.action == "stop":
            run.control.mkdir(exist_ok=True)
            run.stop.touch()
