"""The report's Scores: bits per byte beside the compressors, and steps x Benchmarks."""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.evaluation.score_table import make_table
from pipeline.report.charts import Chart, figure
from pipeline.report.markup import Html, bars, details, join, table, tag
from pipeline.run.records import Record, number, whole
from pipeline.status.read import Status
from pipeline.status.view import beats, compared


def scores(status: Status, charts: list[Chart]) -> Html:
    """Return bits per byte beside the compressors as bars, then all Scores in a table."""
    if not status.scores and not status.compressors:
        return Html("")
    listed = [_score_table(status), _score_details(status)] if status.scores else []
    return join([_bars(status), *[figure(chart) for chart in charts], *listed])


def _score_table(status: Status) -> Html:
    """Return steps x Benchmarks, each Score with its standard error."""
    found = make_table(status.scores)
    names = [f"{name.replace('_', ' ')} ({unit})" for name, unit in zip(found.benchmarks, found.units, strict=True)]
    rows = [
        (
            f"{step:,}",
            *[str(cell) if cell else "" for cell in cells],
            ", ".join(["newest"] * (step == found.newest) + ["released"] * (step == status.released)),
        )
        for step, cells in found.rows
    ]
    return table(("step", *names, "* best"), rows, numbers=range(len(names) + 1))


def _score_details(status: Status) -> Html:
    """Return what each Score was divided by, and what it took."""
    rows = [(f"{score.step:,}", score.benchmark, *_detail_cells(score.details)) for score in status.scores]
    titles = ("step", "benchmark", "nll per token", "perplexity per token", "tokens", "bytes", "questions", "seconds")
    note = "Numbers per token compare models of one tokenizer only; those per byte compare any."
    return details("Scores in detail", tag("p", note, class_="note"), table(titles, rows, numbers=(0, *range(2, 8))))


def _detail_cells(record: Record) -> Iterable[str]:
    nll, perplexity = number(record.get("nll_per_token")), number(record.get("perplexity_per_token"))
    yield f"{nll:.4f}" if nll is not None else ""
    yield f"{perplexity:,.2f}" if perplexity is not None else ""
    for key in ("tokens", "bytes", "questions"):
        yield f"{value:,}" if (value := whole(record.get(key))) is not None else ""
    seconds = number(record.get("seconds"))
    yield f"{seconds:.1f}" if seconds is not None else ""


def _bars(status: Status) -> Html:
    """Draw bits per byte as bars, the worst first."""
    found = [(name, value, "") for name, value in status.compressors.items()]
    if scored := [score for score in status.scores if score.benchmark == "bits_per_byte"]:
        found.append((f"this model, step {scored[-1].step:,}", scored[-1].score, "model"))
    if not found:
        return Html("")
    rows = [(name, value, f"{value:.3f}", kind) for name, value, kind in sorted(found, key=lambda bar: -bar[1])]
    note = "Bits per byte of the validation text; fewer is better. "
    if comparison := beats(status):
        sentence = compared(*comparison)
        note += f"The model {sentence if sentence.startswith('beats') else 'is ' + sentence}. "
    note += "The size of the model itself is not counted."
    return join([tag("p", note, class_="note"), bars(rows)])
