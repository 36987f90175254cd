"""Runs side by side: a best only among numbers that compare, and a clear word on those that do not."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from slurm_site import Pipeline

from pipeline.errors import UserError
from pipeline.evaluation.compare import OTHER_TOKENIZER, Column, compare, read_row
from pipeline.evaluation.release import promote
from pipeline.files import write_json, write_text
from pipeline.run.folder import Run

TEXT, TOKENIZER = "7e47" * 16, "c0ffee" * 10


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def make(name: str, step: int, score: float, benchmark: str = "bits_per_byte", **changes: Any) -> Run:
    """Add a Score to the Run of that name, which is made first if it is not there."""
    run = Run(Path(name).absolute())
    write_text(run.config, f"name: {name}\n")
    write_json(run.checkpoint(step) / "manifest.json", {"step": step, "sha256": f"of {step}"})
    record = {"benchmark": benchmark, "step": step, "score": score, "unit": "share", "error": 0.01}
    if benchmark == "bits_per_byte":
        record |= {"unit": "bits/byte", "bytes": 4000, "tokens": 1000}
    record |= {"content_sha256": TEXT, "tokenizer": TOKENIZER, "checkpoint_sha256": f"of {step}"}
    write_json(run.score(step, benchmark), record | changes)
    return run


def columns(*words: str) -> dict[str, Column]:
    return {column.name: column for column in compare([read_row(word, "newest") for word in words])}


def texts(column: Column) -> list[str]:
    return [str(cell or "") for cell in column.cells]


def test_one_text_and_one_tokenizer_compare_in_all() -> None:
    make("a", 100, 1.5)
    make("a", 200, 1.25)
    make("b", 300, 1.0)
    make("b", 300, 0.5, "capitals", questions=40)
    found = columns("a", "b")
    assert list(found) == ["bits_per_byte", "nll_per_token", "capitals"]
    assert texts(found["bits_per_byte"]) == ["1.2500 ± 0.0100", "1.0000 ± 0.0100 *"]
    nats = math.log(2) * 4000 / 1000
    assert texts(found["nll_per_token"]) == [f"{1.25 * nats:.4f} ± 0.0277", f"{nats:.4f} ± 0.0277 *"]
    assert texts(found["capitals"]) == ["", "0.5000 ± 0.0100"]  # alone, it is not the best of anything
    assert not any(column.reason for column in found.values())


def test_what_is_per_token_is_refused_for_another_tokenizer(pipeline: Pipeline) -> None:
    make("a", 200, 1.25)
    make("[b]", 200, 1.0, tokens=2000, tokenizer="decaf" * 12)  # half the nats per token, only by more tokens
    shown = pipeline("compare", "a", "[b]")
    assert shown.returncode == 0, shown.stderr
    first, second = (line for line in shown.stdout.splitlines() if line.startswith(("a:200", "[b]:200")))
    assert "1.2500 ± 0.0100 " in first
    assert "1.0000 ± 0.0100 *" in second
    assert OTHER_TOKENIZER in first
    assert OTHER_TOKENIZER in second
    assert f"nll_per_token: {OTHER_TOKENIZER}; compare bits per byte" in shown.stdout
    assert second.split()[-3:] == ["4,000", "2,000", "decafdec"]
    found = json.loads(pipeline("compare", "a", "[b]", "--json").stdout)
    assert [(run["run"], run["step"], run["bytes"], run["tokens"]) for run in found["runs"]] == [
        ("a", 200, 4000, 1000), ("[b]", 200, 4000, 2000),
    ]  # fmt: skip
    by_name = {column["name"]: column for column in found["columns"]}
    assert by_name["bits_per_byte"]["cells"][1] == {"score": 1.0, "error": 0.01, "best": True}
    assert by_name["nll_per_token"] == {
        "name": "nll_per_token", "unit": "nats/token", "cells": [None, None], "reason": OTHER_TOKENIZER,
    }  # fmt: skip


def test_none_is_the_best_where_texts_differ() -> None:
    make("a", 200, 1.25)
    make("b", 200, 1.0, content_sha256="0123" * 16, bytes=5000)
    make("c", 200, 2.0)
    for name in "ac":
        make(name, 200, 0.5, "capitals", questions=40)
    found = columns("a", "b", "c")
    for name in ("bits_per_byte", "nll_per_token"):
        assert not any("*" in text for text in texts(found[name]))
        assert found[name].reason == (
            "not of the same text, so none is the best: a:200 and c:200: 4,000 bytes, sha256 7e477e47; "
            "b:200: 5,000 bytes, sha256 01230123"
        )
    assert texts(found["capitals"]) == ["0.5000 ± 0.0100 *", "", "0.5000 ± 0.0100 *"]


def test_scores_that_do_not_name_their_text_compare_within_their_run_alone() -> None:
    for name, step, score in (("a", 100, 1.5), ("a", 200, 1.25), ("b", 200, 1.0)):
        make(name, step, score, content_sha256=None, tokenizer=None)
    within = columns("a:100", "a:200")
    assert texts(within["bits_per_byte"]) == ["1.5000 ± 0.0100", "1.2500 ± 0.0100 *"]
    across = columns("a", "b")
    assert across["bits_per_byte"].reason.startswith("not known to be of the same text, so none is the best: a:200: ")
    assert across["nll_per_token"].reason == OTHER_TOKENIZER


def test_which_checkpoint() -> None:
    for step, score in ((100, 1.5), (200, 1.25), (300, 1.75)):
        run = make("a", step, score)
    promote(run, 100, "")
    steps = {at: read_row("a", at).step for at in ("newest", "best", "released")}
    assert steps == {"newest": 300, "best": 200, "released": 100}
    assert read_row("a:200", "released").step == 200
    write_json(run.checkpoint(300) / "manifest.json", {"step": 300, "sha256": "trained again"})
    assert read_row("a", "newest").step == 200  # the Score of step 300 is of weights that are gone
    make("odd:7", 100, 1.0)
    assert read_row("odd:7", "newest").title == "odd:7:100"


@pytest.mark.parametrize(
    ("word", "at", "said"),
    [
        ("nowhere", "newest", "nowhere: no Run here"),
        ("empty", "newest", "empty: no Score of any checkpoint yet; they are written by: .* resume empty"),
        ("questions:300", "newest", "questions: step 300 has no Score; there are Scores of: 200"),
        ("questions", "best", "questions: no Score of bits_per_byte tells the best; name a step, as questions:STEP"),
        ("questions", "released", "questions: no checkpoint is released; name a step, as questions:STEP, of: 200"),
    ],
)
def test_what_is_not_there_is_said(word: str, at: str, said: str) -> None:
    write_text(Path("empty/config.yaml"), "name: empty\n")
    make("questions", 200, 0.5, "capitals")
    with pytest.raises(UserError, match=said):
        read_row(word, at)


def test_wrong_use_is_one_message(pipeline: Pipeline) -> None:
    run = make("a", 200, 1.0)
    write_text(Path("far/config.yaml"), "name: far\n")
    write_text(Path("far/cluster.yaml"), "login: {prefix: reach, root: /over/there}\npython: /x\nhost_python: /x\n")
    for words, said in (
        ((run.root,), "compare takes two checkpoints or more"),
        (("a", "a", "--at", "oldest"), "--at oldest: there are newest, best, released"),
        (("a", "far:200"), "far:200: this Run is elsewhere, in /over/there/far, and compare reads Runs"),
    ):
        refused = pipeline("compare", *words)
        assert refused.returncode == 2
        assert refused.stdout == ""
        assert refused.stderr.startswith(f"error: {said}"), refused.stderr
        assert len(refused.stderr.splitlines()) == 1
