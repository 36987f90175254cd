"""HTML that is escaped by construction: plain text becomes text, only Html stays markup."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from pipeline.visible import visible

VOID = ("input",)  # elements without content or end tag


class Html(str):
    """Text that is markup already."""


def safe(child: str) -> Html:
    """Return markup as it is and escape everything else; control characters, which HTML forbids, become visible."""
    if isinstance(child, Html):
        return child
    return Html(escape(visible(child)))


def tag(element: str, *children: str, **attributes: str) -> Html:
    """Return `<element attributes>children</element>`; `class_` and `data_x` are written class and data-x."""
    listed = "".join(f' {name.rstrip("_").replace("_", "-")}="{escape(value)}"' for name, value in attributes.items())
    return Html(f"<{element}{listed}>" if element in VOID else f"<{element}{listed}>{join(children)}</{element}>")


def join(children: Iterable[str]) -> Html:
    """Return the children one after another."""
    return Html("".join(safe(child) for child in children))


def table(titles: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = (), class_: str = "") -> Html:
    """Return a table that scrolls by itself on a narrow screen; columns `numbers` are set flush right."""

    def cells(kind: str, row: Sequence[str]) -> Html:
        parts = [tag(kind, cell, **({"class_": "number"} if at in numbers else {})) for at, cell in enumerate(row)]
        return tag("tr", *parts)

    head = [tag("thead", cells("th", titles))] if any(titles) else []
    body = tag("tbody", *[cells("td", row) for row in rows])
    return tag("div", tag("table", *head, body, class_=class_), class_="scroll")


def details(summary: str, *children: str, opened: bool = False) -> Html:
    """Return a part that the reader may fold."""
    return tag("details", tag("summary", summary), *children, **({"open": ""} if opened else {}))


def bars(rows: Sequence[tuple[str, float, str, str]]) -> Html:
    """Return bars of HTML, which need no script and print as they are: of (label, length, value as text, class) each.

    The longest fills its track.
    """
    longest = max((length for _, length, _, _ in rows), default=0) or 1.0
    cells = []
    for label, length, told, kind in rows:
        fill = tag("div", class_=f"fill {kind}".strip(), style=f"width:{100 * length / longest:.2f}%")
        cells += [
            tag("div", label, class_=kind),
            tag("div", fill, class_="track"),
            tag("div", told, class_=f"value {kind}".strip()),
        ]
    return tag("div", tag("div", *cells, class_="bars"), class_="panel")
