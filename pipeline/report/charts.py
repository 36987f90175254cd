"""The curves of a report: data for report.js, and the plotly.js that draws them, both inside the file."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

from pipeline.report.markup import Html, join, tag
from pipeline.run.records import Record, Score, number

MAX_POINTS = 1500  # per curve: more than a screen has columns, and a six-week Run still makes a small file
SMOOTHING_SHARE = 0.03  # of a curve that the running mean is over

Chart = dict[str, Any]


def plotly_source() -> str | None:
    """Return the text of plotly.js; None where the package is not installed."""
    try:
        from plotly.offline import get_plotlyjs  # an extra, and half a second to import
    except ImportError:
        return None
    return str(get_plotlyjs())


def training_charts(metrics: list[Record]) -> list[Chart]:
    """Return the curves of metrics.jsonl; a quantity that no line has is left out."""
    charts = [
        _chart("loss", "Loss", "nats per token", metrics, "accent", smoothed=True, wide=True),
        _chart("lr", "Learning rate", "", metrics, "second", zero=True),
        _chart("tokens_per_s", "Speed", "tokens/s", metrics, "third", zero=True),
        _chart("grad_norm", "Gradient norm", "before clipping", metrics, "fourth", smoothed=True),
        _chart("mfu", "MFU", "share of the hardware's peak FLOPs", metrics, "third", zero=True),
    ]
    return [chart for chart in charts if chart["curves"]]


def score_charts(scores: list[Score], compressors: dict[str, float]) -> list[Chart]:
    """Return each Benchmark over steps, once there are two checkpoints to join; compressors beside bits per byte."""
    charts = []
    for name in dict.fromkeys(score.benchmark for score in scores):
        points = [score for score in scores if score.benchmark == name]
        if len(points) < 2:
            continue
        in_bits = name == "bits_per_byte"
        unit, color = points[0].unit, "accent" if in_bits else "second"
        title, told = ("Over the training", "bits per byte; fewer is better") if in_bits else (name, unit)
        curve = _curve([score.step for score in points], [score.score for score in points], unit, color)
        levels = [{"name": other, "y": value} for other, value in compressors.items()] if in_bits else []
        chart = _frame(f"chart-score-{name}", title, told, [curve | {"marks": True}], wide=in_bits)
        charts.append(chart | {"levels": levels, "zero": True, "linear": True})
    return charts


def figure(chart: Chart) -> Html:
    """Return the place where report.js draws a chart."""
    caption = tag("figcaption", chart["title"], *([" ", tag("span", chart["unit"])] if chart["unit"] else []))
    label = f"Curve of {chart['title'].lower()} over steps"
    plot = tag("div", id=chart["id"], class_="plot", role="img", aria_label=label)
    return tag("figure", caption, plot, class_="chart wide" if chart["wide"] else "chart")


def scripts(charts: list[Chart]) -> Html:
    """Return all scripts of the report: plotly.js, the data and report.js."""
    source = plotly_source()
    if source is None or not charts:
        return Html("")
    source = source.replace("</script", "<\\/script")
    # "<" is spelled out, so that no text in the data can end the script element.
    data = json.dumps(charts, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    own = Path(__file__).with_name("report.js").read_text(encoding="utf-8")
    return join(
        [
            Html(f"<script>{source}</script>\n"),
            Html(f'<script type="application/json" id="charts">{data}</script>\n'),
            Html(f"<script>{own}</script>"),
        ]
    )


def _chart(
    key: str, title: str, unit: str, metrics: list[Record], color: str, *,
    smoothed: bool = False, wide: bool = False, zero: bool = False,
) -> Chart:  # fmt: skip
    rows = [(row["step"], value) for row in metrics if (value := number(row.get(key))) is not None]
    steps, values = [step for step, _ in rows], [value for _, value in rows]
    curves = []
    if rows:
        curves.append(_curve(steps, values, title.lower(), color) | {"faint": smoothed})
    if rows and smoothed:
        curves.append(_curve(steps, running_mean(values), "running mean", color) | {"smoothed": True})
    return _frame(f"chart-{key}", title, unit, curves, wide=wide) | {"zero": zero}


def _frame(id_: str, title: str, unit: str, curves: list[dict[str, Any]], *, wide: bool) -> Chart:
    return {"id": id_, "title": title, "unit": unit, "curves": curves, "wide": wide, "levels": []}


def _curve(steps: list[int], values: list[float], name: str, color: str) -> dict[str, Any]:
    kept = thinned(len(steps))
    return {"x": [steps[at] for at in kept], "y": [_rounded(values[at]) for at in kept], "name": name, "color": color}


def running_mean(values: list[float]) -> list[float]:
    """Return the mean around each value, as far on both sides of it, so that a falling curve has no lag."""
    reach = max(2, round(SMOOTHING_SHARE * len(values) / 2))
    sums = [0.0, *accumulate(values)]
    means = []
    for at in range(len(values)):
        side = min(reach, at, len(values) - 1 - at)  # less at the ends
        means.append((sums[at + side + 1] - sums[at - side]) / (2 * side + 1))
    return means


def thinned(count: int, limit: int = MAX_POINTS) -> list[int]:
    """Choose at most `limit` of `count` positions, evenly, the first and the last among them."""
    if count <= limit:
        return list(range(count))
    return [round(at * (count - 1) / (limit - 1)) for at in range(limit)]


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")  # five digits are more than a screen shows, and half the file
