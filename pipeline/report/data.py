"""What the text of a Run is like: lengths of documents and frequencies of tokens, drawn without a script."""

from __future__ import annotations

import math
from typing import Any

from pipeline.report.markup import Html, bars, join, tag
from pipeline.run.records import Record, whole
from pipeline.units import short, size

WIDTH, HEIGHT, LEFT, BOTTOM = 640, 260, 56, 34  # of the curve, its axes included

Points = list[tuple[int, int]]


def text_charts(index: Record) -> Html:
    """Return how long documents are, how often tokens occur, and whether a text is in both splits."""
    splits = index.get("splits")
    train = splits.get("train") if isinstance(splits, dict) else None
    train = train if isinstance(train, dict) else {}
    lengths, frequencies = points(train.get("document_lengths")), points(train.get("token_frequencies"))
    return join(
        [_leaks(index), *([_lengths(lengths)] if lengths else []), *([_curve(frequencies)] if frequencies else [])]
    )


def points(value: Any) -> Points:
    """Return the pairs of positive whole numbers of a list; what is none is left out."""
    pairs = value if isinstance(value, list) else []
    read = [(whole(pair[0]), whole(pair[1])) for pair in pairs if isinstance(pair, list) and len(pair) == 2]
    return [(x, y) for x, y in read if x and y and x > 0 and y > 0]


def _leaks(index: Record) -> Html:
    number = whole(index.get("in_both_splits"))
    if number is None:
        return Html("")
    told = (
        "No text of the validation split is in the train split"
        if not number
        else f"{number:,} texts are in both splits"
    )
    return tag("p", f"{told}, by the hashes of all documents.", class_="note")


def _lengths(lengths: Points) -> Html:
    """Draw the documents of each power of two of bytes as bars."""
    rows = [(f"{size(start)} to {size(2 * start)}", number, f"{number:,}", "") for start, number in lengths]
    note = tag("p", "Documents of the train split by their length.", class_="note")
    return join([note, bars(rows)])


def _curve(frequencies: Points) -> Html:
    """Draw how often the token of each rank occurs, both axes logarithmic: a natural text is nearly a line (Zipf)."""
    last, most = max(2, frequencies[-1][0]), max(2, frequencies[0][1])
    high = WIDTH - LEFT - 12, HEIGHT - BOTTOM - 12

    def place(rank: float, number: float) -> tuple[float, float]:
        x = LEFT + high[0] * math.log(rank) / math.log(last)
        return round(x, 1), round(HEIGHT - BOTTOM - high[1] * math.log(number) / math.log(most), 1)

    parts = []
    for rank in _decades(last):
        x, y = place(rank, 1)
        parts += [_line(x, y, x, 12), _text(short(rank), x, y + 18, "middle")]
    for number in _decades(most):
        x, y = place(1, number)
        parts += [_line(x, y, WIDTH - 12, y), _text(short(number), x - 8, y + 4, "end")]
    line = " ".join(f"{x},{y}" for x, y in (place(*point) for point in frequencies))
    style = {"fill": "none", "stroke": "var(--accent)", "stroke_width": "2"}
    drawing = tag(
        "svg", *parts, tag("polyline", points=line, **style),
        viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label="Occurrences of tokens by rank", width="100%",
    )  # fmt: skip
    note = (
        f"How often each of the {last:,} tokens that occur does so in the train split, by rank; both axes logarithmic."
    )
    return join([tag("p", note, class_="note"), tag("div", drawing, class_="panel")])


def _decades(last: int) -> list[int]:
    return [10**power for power in range(int(math.log10(last)) + 1)]


def _line(x: float, y: float, to_x: float, to_y: float) -> Html:
    ends = {"x1": f"{x}", "y1": f"{y}", "x2": f"{to_x}", "y2": f"{to_y}"}
    return tag("line", stroke="var(--line)", stroke_width="1", **ends)


def _text(text: str, x: float, y: float, anchor: str) -> Html:
    return tag("text", text, x=f"{x}", y=f"{y}", text_anchor=anchor, font_size="12", fill="var(--muted)")
