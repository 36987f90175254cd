"""Checkpoints of Runs side by side: a column per Benchmark, the best marked where the numbers compare.

Bits per byte do where they were measured on the same text; loss and perplexity per token only where the tokenizer is
the same too, because another one cuts the same text into fewer or more tokens.
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pipeline.config.evaluate import BITS_PER_BYTE
from pipeline.errors import UserError
from pipeline.evaluation.release import released
from pipeline.evaluation.score_table import Cell, best_of
from pipeline.evaluation.scoring import is_scored
from pipeline.hints import command
from pipeline.run.folder import Run
from pipeline.run.records import Record, Score, number, read_scores, whole

CHOICES = ("newest", "best", "released")
PER_TOKEN = "nll_per_token"
UNNAMED = "scored by a version that did not say of which"
OTHER_TOKENIZER = "not comparable: other tokenizer"


@dataclass(frozen=True)
class Row:
    """The Scores of one checkpoint by Benchmark, with bits per byte also per token; `name` is the Run's path."""

    name: str
    root: Path
    step: int
    scores: dict[str, Score]

    @property
    def title(self) -> str:
        return f"{self.name}:{self.step}"

    @property
    def text(self) -> Record:
        """Return what bits per byte were divided by, and what the tokenizer made of it."""
        details = self.scores[BITS_PER_BYTE].details if BITS_PER_BYTE in self.scores else {}
        return {key: details.get(key) for key in ("bytes", "tokens", "tokenizer")}

    def about(self, column: str, key: str) -> str:
        """Return what a Score says of itself; one that does not is like those of its own Run alone."""
        return str(self.scores[column].details.get(key) or self.root)


@dataclass(frozen=True)
class Column:
    """A cell for each Row, None where there is no Score or none to compare; `reason`: why none is marked as best."""

    name: str
    unit: str
    cells: list[Cell | None]
    reason: str


def split(word: str) -> tuple[str, int | None]:
    """Cut RUN:STEP in two; a folder that is really called so is a Run."""
    cut = None if Path(word).is_dir() else re.fullmatch(r"(.+):([0-9]+)", word)
    return (cut[1], int(cut[2])) if cut else (word, None)


def read_row(word: str, at: str) -> Row:
    """Read the checkpoint RUN:STEP, or of RUN the one that `at` says: newest (with a Score), best, released.

    Raises UserError where there is no Run, or no Score of it.
    """
    name, step = split(word)
    run = Run.open(Path(name))
    scores = [score for score in read_scores(run) if is_scored(run, score.step, score.benchmark)]
    if not scores:
        raise UserError(f"{name}: no Score of any checkpoint yet; they are written by: {command('resume', run.root)}")
    if step is None:
        best = best_of([score for score in scores if score.benchmark == BITS_PER_BYTE])
        step = {"newest": scores[-1].step, "best": best.step if best else None, "released": released(run)}[at]
    steps = ", ".join(map(str, sorted({score.step for score in scores})))
    if step is None:
        what = "checkpoint is released" if at == "released" else f"Score of {BITS_PER_BYTE} tells the best"
        raise UserError(f"{name}: no {what}; name a step, as {name}:STEP, of: {steps}")
    here = {score.benchmark: score for score in scores if score.step == step}
    if not here:
        raise UserError(f"{name}: step {step} has no Score; there are Scores of: {steps}")
    return Row(name, run.root, step, here | _per_token(here.get(BITS_PER_BYTE)))


def _per_token(bits: Score | None) -> dict[str, Score]:
    """Return what bits per byte come to in nats per token."""
    size, tokens = (whole(bits.details.get(key)) for key in ("bytes", "tokens")) if bits else (None, None)
    if bits is None or not size or not tokens:
        return {}
    nats, error = math.log(2) * size / tokens, number(bits.details.get("error"))
    details = bits.details | {"error": error and error * nats}
    return {PER_TOKEN: replace(bits, benchmark=PER_TOKEN, score=bits.score * nats, unit="nats/token", details=details)}


def compare(rows: list[Row]) -> list[Column]:
    """Return a column for each Benchmark that one of them has, bits per byte first."""
    first, names = (BITS_PER_BYTE, PER_TOKEN), {name for row in rows for name in row.scores}
    return [_column(rows, name) for name in sorted(names, key=lambda name: (name not in first, name))]


def _column(rows: list[Row], name: str) -> Column:
    found = [row.scores.get(name) for row in rows]
    scored = [row for row in rows if name in row.scores]
    unit = scored[0].scores[name].unit
    if name == PER_TOKEN and len({row.about(name, "tokenizer") for row in scored}) > 1:
        return Column(name, unit, [None] * len(rows), OTHER_TOKENIZER)
    reason = _texts_differ(scored, name)
    best = best_of([row.scores[name] for row in scored]) if len(scored) > 1 and not reason else None
    top = best.score if best else None
    cells = [Cell(s.score, number(s.details.get("error")), s.score == top) if s else None for s in found]
    return Column(name, unit, cells, reason)


def _texts_differ(rows: list[Row], name: str) -> str:
    """Say which checkpoints were measured on which text or questions, where not all on the same."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        score, content = row.scores[name], row.about(name, "content_sha256")
        counts = [f"{count:,} {key}" for key in ("bytes", "questions") if (count := whole(score.details.get(key)))]
        which = UNNAMED if content == str(row.root) else f"sha256 {content[:8]}"
        groups.setdefault((score.unit, content, ", ".join([*counts, which])), []).append(row.title)
    if len(groups) < 2:
        return ""
    told = "; ".join(f"{' and '.join(titles)}: {text}" for (_, _, text), titles in groups.items())
    return f"not {'known to be ' if UNNAMED in told else ''}of the same text, so none is the best: {told}"


def to_json(rows: list[Row], columns: list[Column]) -> Record:
    """Return what the table shows; a number that must not be compared is null."""
    runs = [{"run": row.name, "step": row.step} | row.text for row in rows]
    return {"runs": runs, "columns": [asdict(column) for column in columns]}
