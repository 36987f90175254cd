"""One table: steps x Benchmarks, with errors, the best and the newest marked; for status, the report and scores.csv."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass

from pipeline.evaluation.score_kinds import LOWER_IS_BETTER
from pipeline.files import write_text
from pipeline.run.folder import Run
from pipeline.run.records import Score, number, read_scores


@dataclass(frozen=True)
class Cell:
    """One Score of the table; `error` is its standard error. As text the best is marked by a star."""

    score: float
    error: float | None
    best: bool

    def __str__(self) -> str:
        return f"{self.score:.4f}" + (f" ± {self.error:.4f}" if self.error else "") + (" *" if self.best else "")


@dataclass(frozen=True)
class Table:
    """`rows` holds for each step, ascending, a cell for each Benchmark, None where it was not scored."""

    benchmarks: list[str]
    units: list[str]
    rows: list[tuple[int, list[Cell | None]]]

    @property
    def newest(self) -> int | None:
        return self.rows[-1][0] if self.rows else None


def better(one: Score, other: Score) -> bool:
    """Tell whether a Score is better than another one of the same Benchmark."""
    lower = one.unit in LOWER_IS_BETTER
    return one.score < other.score if lower else one.score > other.score


def best_of(scores: list[Score]) -> Score | None:
    """Return the best of the Scores of one Benchmark; of equal ones the first."""
    best: Score | None = None
    for score in scores:
        best = score if best is None or better(score, best) else best
    return best


def make_table(scores: list[Score]) -> Table:
    """Arrange Scores. bits_per_byte comes first, then the others by name."""
    names = sorted({score.benchmark for score in scores}, key=lambda name: (name != "bits_per_byte", name))
    best = {name: best_of([score for score in scores if score.benchmark == name]) for name in names}
    units = [next(score.unit for score in scores if score.benchmark == name) for name in names]
    rows: list[tuple[int, list[Cell | None]]] = []
    for step in sorted({score.step for score in scores}):
        here = {score.benchmark: score for score in scores if score.step == step}
        cells = [
            Cell(here[name].score, number(here[name].details.get("error")), here[name] == best[name])
            if name in here
            else None
            for name in names
        ]
        rows.append((step, cells))
    return Table(names, units, rows)


def write_table(run: Run) -> None:
    """Write scores.csv from all Scores that are there: one line a step, an empty cell where there is none."""
    table = make_table(read_scores(run))
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["step", *(column for name in table.benchmarks for column in (name, f"{name}_error")), "marks"])
    for step, cells in table.rows:
        values: list[object] = [step]
        for cell in cells:
            values += ["", ""] if cell is None else [cell.score, "" if cell.error is None else cell.error]
        marks = [f"best {name}" for name, cell in zip(table.benchmarks, cells, strict=True) if cell and cell.best]
        lines.writerow([*values, "; ".join([*marks, "newest"] if step == table.newest else marks)])
    write_text(run.score_table, text.getvalue())
