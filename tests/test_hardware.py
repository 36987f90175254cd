"""When a Run is compiled, and what is said where it cannot be."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

import pytest

from pipeline.config.schema import Config
from pipeline.errors import NotReadyError
from pipeline.lm.hardware import PAYS, choose_hardware
from pipeline.plan.sizes import total_flops


def config(compiled: object, steps: int = 20) -> Config:
    return Config.model_validate({"name": "x", "pretrain": {"compile": compiled, "max_steps": steps}})


LONG = int(1 + PAYS / total_flops(config("auto", 1)))


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler on PATH and Python's headers, whatever this machine has; the folder that both are in."""
    (tmp_path / "g++").write_text("#!/bin/sh\n")
    (tmp_path / "g++").chmod(0o755)
    (tmp_path / "Python.h").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    return tmp_path


@pytest.mark.parametrize(
    ("wanted", "steps", "compiled"),
    [("auto", 20, False), ("auto", LONG, True), (True, 20, True), (False, LONG, False)],
)
def test_auto_compiles_where_it_pays(compiler: Path, wanted: object, steps: int, compiled: bool) -> None:
    assert choose_hardware(config(wanted, steps)).compile is compiled


@pytest.mark.parametrize(
    ("gone", "told"), [("g++", r"a C\+\+ compiler and none is on PATH.*install one"), ("Python.h", "python3-dev")]
)
def test_what_a_compiler_misses_is_told_where_it_was_asked_for(compiler: Path, gone: str, told: str) -> None:
    (compiler / gone).unlink()
    assert choose_hardware(config("auto", LONG)).compile is False
    with pytest.raises(NotReadyError, match=rf"pretrain\.compile: true needs .*{told}"):
        choose_hardware(config(True))


def test_a_run_stays_as_it_was_begun_until_told_otherwise(compiler: Path) -> None:
    assert choose_hardware(config("auto", LONG), {"compile": False}).compile is False
    assert choose_hardware(config("auto"), {"compile": True}).compile is True
    assert choose_hardware(config(False), {"compile": True}).compile is False
    assert choose_hardware(config(True), {"compile": False}).compile is True


def test_a_compiled_run_where_no_compiler_is_left(compiler: Path) -> None:
    (compiler / "g++").unlink()
    with pytest.raises(NotReadyError, match=r"compiled until now, which needs .*pretrain\.compile=false"):
        choose_hardware(config("auto"), {"compile": True})


def test_this_machine_is_asked_without_fakes() -> None:
    there = shutil.which("g++") is not None and (Path(sysconfig.get_path("include")) / "Python.h").is_file()
    if there:
        assert choose_hardware(config(True)).compile is True
    else:
        with pytest.raises(NotReadyError):
            choose_hardware(config(True))
