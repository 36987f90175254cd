"""What the verbs share: their options, and how they talk."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from pipeline.screen import Screen
from pipeline.visible import visible

talk = Screen(stderr=True)

What = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="CONFIG|RUN|key.path=value",
        help="A config or a Run, then overrides. Without a file: configs/tiny.yaml.",
    ),
]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="The Run's folder, such as runs/tiny.")]
ClusterName = Annotated[
    str | None, typer.Option("--cluster", help="Where to run: local, or a cluster's YAML file.", metavar="local|FILE")
]
Yes = Annotated[bool, typer.Option("--yes", help="Submit without asking, whatever it may cost.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
AfterJson = Annotated[bool, typer.Option("--json", help="Print what `status --json` does afterwards.")]


def screen(width: int | None = None) -> Screen:
    """Return a console for results."""
    return Screen(width=width)


def emit(text: str) -> None:
    """Print a result; a reader that has seen enough (| head) is no failure, which it would be to typer."""
    try:
        print(visible(text), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
