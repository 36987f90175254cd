"""A compiler's cache in which somebody was killed is dropped; a whole one stays."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_trainer import config, trainer

from pipeline.lm.compile_cache import begin_compiling, keep_compiled


def compile_one(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "code.so").write_text("machine code")


def test_the_next_attempt_finds_what_was_compiled(tmp_path: Path) -> None:
    begin_compiling(tmp_path / "cache")
    compile_one(tmp_path / "cache")
    keep_compiled(tmp_path / "cache")
    begin_compiling(tmp_path / "cache")
    assert (tmp_path / "cache" / "code.so").is_file()


@pytest.mark.parametrize("whole_before", [False, True])
def test_what_a_killed_attempt_has_compiled_is_dropped(tmp_path: Path, whole_before: bool) -> None:
    if whole_before:
        compile_one(tmp_path / "cache")
        keep_compiled(tmp_path / "cache")
    begin_compiling(tmp_path / "cache")
    compile_one(tmp_path / "cache")
    begin_compiling(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_nothing_compiled_leaves_nothing(tmp_path: Path) -> None:
    begin_compiling(tmp_path / "cache")
    keep_compiled(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_training_tells_of_its_first_step_once_in_every_attempt(tmp_path: Path) -> None:
    told: list[int] = []
    for stop_after in (3, None):
        run = trainer(tmp_path / "run", config(), stop_after, first_step_done=lambda: told.append(1))
        run.train()
        assert len(told) == (1 if stop_after else 2)
