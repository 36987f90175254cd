"""The one kind of Console: what it is given is text, not markup, and reaches the terminal as visible characters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from pipeline.visible import visible


class Screen(Console):
    """A Console for text that anybody may have written: a log, a record, a name. Styles are given as Text alone.

    Without emoji: their table costs as much as a plan, and `:x:` stays what it is.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, highlight=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as rich does; only what rich itself writes to move the cursor stays what it is."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))
