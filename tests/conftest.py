"""Fixtures: the corpus, the config, and the command line as a person uses it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes import fake as fake  # a fixture
from micro import MICRO, PROJECT, environment, mind_signals, write_corpus

__all__ = ["MICRO", "PROJECT", "environment", "write_corpus"]


def pytest_configure() -> None:
    mind_signals()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text") / "corpus"
    write_corpus(folder)
    return folder


@pytest.fixture
def micro(tmp_path: Path, corpus: Path) -> Path:
    """Return the path of a config whose Run is tmp_path/runs/micro."""
    path = tmp_path / "micro.yaml"
    path.write_text(MICRO.format(runs=tmp_path / "runs", corpus=corpus), encoding="utf-8")
    return path


def pipeline_in(folder: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs `python -m pipeline WORDS` in a folder and returns what came of it."""

    def run(*words: object, timeout: float = 120, **changes: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "pipeline", *map(str, words)],
            capture_output=True, text=True, cwd=folder, env=environment(**changes), timeout=timeout, check=False,
        )  # fmt: skip

    return run


@pytest.fixture
def pipeline(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs `python -m pipeline WORDS` in tmp_path and returns what came of it."""
    return pipeline_in(tmp_path)
