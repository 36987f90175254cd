"""Metrics go to TensorBoard and W&B too; the packages here are stand-ins that write down how they were called."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import NotReadyError
from pipeline.lm.sinks import numbers, open_sinks

WANDB = """
import json, os
LOG = os.environ["SINK_LOG"]

def note(*what):
    with open(LOG, "a") as file:
        file.write(json.dumps(what) + "\\n")

class Run:
    def define_metric(self, name, step_metric): note("define", name, step_metric)
    def log(self, values): note("log", values)
    def finish(self): note("finish")

def init(**words):
    note("init", words)
    return Run()
"""


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a stand-in of the package; return the file that it writes to."""
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "wandb.py").write_text(WANDB)
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    monkeypatch.setenv("SINK_LOG", str(tmp_path / "calls"))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    yield tmp_path / "calls"
    sys.modules.pop("wandb", None)


def calls(log: Path) -> list[list[Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_wandb_is_offline_and_goes_on_with_the_same_run(tmp_path: Path, wandb: Path) -> None:
    for step in (10, 20):
        (sink,) = open_sinks(["wandb"], tmp_path / "sinks", "mine", "5f3a")
        sink.write(step, numbers({"step": step, "loss": 2.5, "mfu": None, "time": 1.7e9}))
        sink.close()
    init = {"project": "pretrain-pipeline", "name": "mine", "id": "5f3a", "mode": "offline", "resume": "allow"}
    init["dir"] = str(tmp_path / "sinks")
    assert calls(wandb) == [
        line
        for step in (10, 20)
        for line in (["init", init], ["define", "*", "step"], ["log", {"step": step, "loss": 2.5}], ["finish"])
    ]


def test_wandb_is_online_where_a_person_says_so(tmp_path: Path, wandb: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    open_sinks(["wandb"], tmp_path / "sinks", "mine", "5f3a")
    assert calls(wandb)[0][1]["mode"] == "online"


def test_a_sink_without_its_package_is_refused_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])  # where there is nothing
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(NotReadyError, match=r"pretrain\.sinks: wandb is not installed where this runs; .*pip install"):
        open_sinks(["wandb"], tmp_path / "sinks", "mine", "5f3a")
