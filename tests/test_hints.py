"""Hints are commands that work as printed, from the folder they are printed in."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.hints import command, shown


def test_paths_are_shown_from_here_where_that_is_shorter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert shown(tmp_path / "runs" / "my run") == "runs/my run"
    assert shown("/x") == "/x"


def test_a_printed_command_runs_and_keeps_blanks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    line = command("status", tmp_path / "my run")
    assert shlex.split(line)[1:] == ["-m", "pipeline", "status", "my run"]
    python = shlex.split(line)[0]
    done = subprocess.run(
        ["sh", "-c", f"{shlex.quote(python)} -c 'import sys; print(sys.prefix)'"], capture_output=True, text=True
    )
    assert done.stdout.strip() == sys.prefix
