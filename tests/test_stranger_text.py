"""What others have written reaches a terminal as visible characters: logs, records, names, the words of a model."""

from __future__ import annotations

import ast
import io
import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from conftest import PROJECT
from example_run import job, make_run, write_jobs
from rich.table import Table
from rich.text import Text

from pipeline.files import write_text
from pipeline.run.folder import Run
from pipeline.screen import Screen
from pipeline.visible import HIDDEN, visible, visible_json

CLIPBOARD = "\x1b]52;c;cm0gLXJmIH4K\x07"  # OSC 52: fills it
TITLE = "\x1b]0;another window\x07"
CLEAR = "\x1b[2J\x1b[H"
EIGHT_BIT = "\x9b2J"  # the same, for a terminal that reads C1
BACKWARDS = "\u202esdrow"
HOSTILE = f"{CLIPBOARD}{TITLE}{CLEAR}{EIGHT_BIT}{BACKWARDS}\x7f\b\r"


def harmless(text: str) -> bool:
    return not HIDDEN.search(text)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return a Run whose every word is a stranger's."""
    run = make_run(tmp_path / "example")
    stranger = job("[/x]", HOSTILE, state="failed", reason=f"[bold]{HOSTILE}[/y]", log=f"logs/{HOSTILE}.log")
    write_jobs(run, [stranger, job("pretrain", f"2[/]{HOSTILE}", state=HOSTILE)])
    write_text(run.log("pretrain", "2", 0), f"before {HOSTILE} after\n")
    write_text(run.logs / f"{TITLE}.log", "of no stage\n")
    return run


def test_what_a_terminal_would_obey_is_shown() -> None:
    assert visible(CLEAR) == "␛[2J␛[H"
    assert visible("one\ttwo\n€ 日本 ␛ 👍🏽 é") == "one\ttwo\n€ 日本 ␛ 👍🏽 é"
    assert harmless(visible(HOSTILE + "\ud800"))


def test_json_with_such_characters_means_the_same() -> None:
    value = {"completion": HOSTILE + "日本\n"}
    written = visible_json(json.dumps(value, ensure_ascii=False))
    assert harmless(written)
    assert "日本" in written
    assert json.loads(written) == value


def test_a_screen_takes_text_in_any_wrapping() -> None:
    out = io.StringIO()
    screen = Screen(file=out, force_terminal=True, color_system=None, width=200)
    table = Table(HOSTILE, "[/title]")
    table.add_row(HOSTILE, "[/row]")
    screen.print(Text(HOSTILE, "bold"), HOSTILE, "[/word]", ":bomb:", soft_wrap=True)
    screen.print(table)
    shown = out.getvalue()
    assert harmless(shown)
    assert all(word in shown for word in ("[/title]", "[/row]", "[/word]", ":bomb:", "␛]52;c;"))


def test_a_screen_still_draws_in_colour() -> None:
    out = io.StringIO()
    Screen(file=out, force_terminal=True, color_system="standard").print(Text("red", "red"))
    assert "\x1b[31mred" in out.getvalue()


@pytest.mark.parametrize("verb", [["status"], ["logs"], ["compare", "example"]])
def test_looking_at_a_strangers_run(verb: list[str], run: Run, pipeline: Callable[..., CompletedProcess[str]]) -> None:
    came = pipeline(*verb, "example")
    assert "Traceback" not in came.stderr
    assert harmless(came.stdout)
    assert harmless(came.stderr)
    assert came.stdout


def test_status_shows_a_stage_named_as_markup(run: Run, pipeline: Callable[..., CompletedProcess[str]]) -> None:
    assert "[/x]" in pipeline("status", "example").stdout


def test_a_log_can_be_had_as_it_is(run: Run, pipeline: Callable[..., CompletedProcess[str]]) -> None:
    assert "before ␛]52;c;" in pipeline("logs", "example", "--stage", "pretrain").stdout
    assert CLIPBOARD in pipeline("logs", "example", "--stage", "pretrain", "--raw").stdout


def test_an_error_that_quotes_a_file_is_shown(tmp_path: Path, pipeline: Callable[..., CompletedProcess[str]]) -> None:
    (tmp_path / "theirs.yaml").write_text('name: x\n"[/x]\\e]0;title\\a": 1\n', encoding="utf-8")
    came = pipeline("plan", "theirs.yaml")
    assert came.returncode == 2
    assert "Traceback" not in came.stderr
    assert harmless(came.stderr)
    assert "[/x]" in came.stderr


def test_what_a_model_says_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    from pipeline.stages import generate

    generate._say(f"def {HOSTILE}\n")
    out = capsys.readouterr().out
    assert harmless(out)
    assert out.startswith("def ␛]52;c;")


def test_nothing_makes_a_console_of_its_own_or_prints_past_it() -> None:
    """Programs of a Job print into its log, which `logs` shows; a verb's words go through emit, talk or a screen."""
    for path in sorted((PROJECT / "pipeline").rglob("*.py")):
        calls = [n for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.Call)]
        names = [call.func.id for call in calls if isinstance(call.func, ast.Name)]
        assert "Console" not in names, f"{path}: write pipeline.screen.Screen"
        if path.parent.name in ("cli", "status", "submit") or path.name in ("export.py", "generate.py"):
            for call in calls:
                if isinstance(call.func, ast.Name) and call.func.id == "print" and call.args:
                    assert _is_visible(call.args[0]), f"{path}:{call.lineno}: prints what may be a stranger's"


def _is_visible(value: ast.expr) -> bool:
    """Tell whether it went through visible(), or is the package's own version."""
    if isinstance(value, ast.Name):
        return value.id == "__version__"
    if isinstance(value, ast.Subscript):  # generate's JSON lines
        return isinstance(value.value, ast.Name) and value.value.id == "ended"
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "visible"
