"""The verb `compare`: Scores of several Runs in one table. Imports wait as in cli."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from pipeline.cli.words import Json, emit, screen
from pipeline.errors import UserError

WIDE = 200  # what no terminal shows is not broken into lines

if TYPE_CHECKING:
    from rich.text import Text

    from pipeline.evaluation.compare import Column, Row


def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN[:STEP] RUN[:STEP]...", help="Two checkpoints or more.")],
    at: Annotated[
        str, typer.Option("--at", metavar="newest|best|released", help="The checkpoint of a RUN without STEP.")
    ] = "newest",
    as_json: Json = False,
) -> None:
    """Lay the Scores of several Runs side by side, the best marked where they may be compared."""
    from pipeline.cluster.remote import there_of
    from pipeline.evaluation import compare as comparing
    from pipeline.run.folder import Run

    if len(runs) < 2:
        raise UserError("compare takes two checkpoints or more: compare RUN RUN, or RUN:STEP RUN:STEP")
    if at not in comparing.CHOICES:
        raise UserError(f"--at {at}: there are {', '.join(comparing.CHOICES)}")
    for word in runs:
        if there := there_of(Run.open(Path(comparing.split(word)[0]))):
            raise UserError(
                f"{word}: this Run is elsewhere, in {there.run.root}, and compare reads Runs that are on this machine; "
                "call it over there"
            )
    rows = [comparing.read_row(word, at) for word in runs]
    columns = comparing.compare(rows)
    if as_json:
        emit(json.dumps(comparing.to_json(rows, columns), indent=2))
    else:
        piped = None if sys.stdout.isatty() else WIDE
        print_table(rows, columns, screen(piped))


def print_table(rows: list[Row], columns: list[Column], console: Console) -> None:
    """Print a line for each checkpoint, then why a column has no best."""
    from rich.table import Table
    from rich.text import Text

    from pipeline.evaluation.compare import OTHER_TOKENIZER, PER_TOKEN

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("score (* best)", overflow="fold")
    titles = {PER_TOKEN: "nll per token (perplexity)"}
    for title in (*(titles.get(c.name, c.name.replace("_", " ")) for c in columns), "bytes", "tokens", "tokenizer"):
        table.add_column(title, justify="right")
    for at, row in enumerate(rows):
        counts = (f"{count:,}" if isinstance(count := row.text[key], int) else "" for key in ("bytes", "tokens"))
        table.add_row(Text(row.title), *(_shown(c, at) for c in columns), *counts, str(row.text["tokenizer"] or "")[:8])
    console.print(table)
    for column in columns:
        refused = column.reason == OTHER_TOKENIZER and not columns[0].reason  # bits per byte come first
        hint = "; compare bits per byte, which count the same bytes by any tokenizer" if refused else ""
        if column.reason:
            console.print(f"{column.name}: {column.reason}{hint}", soft_wrap=True)


def _shown(column: Column, at: int) -> Text:
    from rich.text import Text

    from pipeline.evaluation.compare import OTHER_TOKENIZER, PER_TOKEN

    if column.reason == OTHER_TOKENIZER:
        return Text(OTHER_TOKENIZER, "yellow")
    if (cell := column.cells[at]) is None:
        return Text("")
    perplexity = f" ({math.exp(min(cell.score, 700)):,.2f})" if column.name == PER_TOKEN else ""  # e^710 is no float
    return Text(f"{cell}{perplexity}", "bold" if cell.best else "")
