"""Progress is plain lines where nobody can redraw one."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from pipeline.config.schema import Config
from pipeline.files import append_line
from pipeline.run.folder import Run
from pipeline.screen import Screen
from pipeline.status.progress import JobProgress, is_lively

CONFIG = Config.model_validate({"name": "x", "pretrain": {"max_steps": 100, "warmup_steps": 1}})


def show(tmp_path: Path, stage: str, write) -> str:
    """Return what is printed on a plain console while `write(run)` happens."""
    run, out = Run(tmp_path), io.StringIO()
    run.logs.mkdir()
    log = run.log(stage, "1", 0)
    log.touch()
    record = {"stage": stage, "log": str(log.relative_to(run.root))}
    with JobProgress(run, CONFIG, record, Screen(file=out, width=200)) as progress:
        progress.update()
        write(run)
        progress.update()
    return out.getvalue()


def test_training_shows_step_loss_speed_and_time_left(tmp_path: Path) -> None:
    def write(run: Run) -> None:
        append_line(run.metrics, {"step": 50, "loss": 2.34, "tokens_per_s": 4096.0})

    text = show(tmp_path, "pretrain", write)
    for part in ("step 50/100", "loss 2.34", "tokens/s", "left"):
        assert part in text


def test_other_stages_pass_their_log_on(tmp_path: Path) -> None:
    text = show(
        tmp_path, "tokenize", lambda run: run.log("tokenize", "1", 0).write_text("one\n[bold]two[/]\nunfinished")
    )
    assert text.splitlines() == ["one", "[bold]two[/]", "unfinished"]


def test_torn_lines_are_no_news(tmp_path: Path) -> None:
    def write(run: Run) -> None:
        run.metrics.write_text('{"step": "x"}\n[]\n{"step": 7, "lo')

    assert show(tmp_path, "pretrain", write) == ""


@pytest.mark.parametrize("name", ["NO_COLOR", "CI"])
def test_plain_where_asked_for(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for other in ("NO_COLOR", "CI"):
        monkeypatch.delenv(other, raising=False)
    console = Screen(force_terminal=True, color_system=None, _environ={"TERM": "xterm"})
    assert is_lively(console)
    monkeypatch.setenv(name, "1")
    assert not is_lively(console)
