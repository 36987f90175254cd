"""The report is one file that asks for nothing, says what happened, and shows text as text."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from example_run import HOSTILE, MAX_STEPS, job, make_run, write_jobs

from pipeline.files import read_json, write_json, write_text
from pipeline.report.charts import running_mean, thinned
from pipeline.report.write import write_report
from pipeline.run.folder import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path / "example")


def html(run: Run) -> str:
    return write_report(run).read_text(encoding="utf-8")


def own_part(page: str) -> str:
    """Return the page without plotly.js, whose source is full of addresses it may draw maps from."""
    return re.sub(r"<script>.{100000,}?</script>", "", page, flags=re.DOTALL)


def test_it_asks_for_nothing_from_outside(run: Run) -> None:
    page = own_part(html(run))
    assert not re.findall(r"""(?:src|href)=["'](?!#|data:)""", page)
    assert "@import" not in page
    assert "url(" not in page


def test_it_tells_the_whole_story(run: Run) -> None:
    page = own_part(html(run))
    for part in ("bits per byte", "xz -9", "def fibonacci(n):", "validation", "0123abcd", "max_steps: 900", "pretrain"):
        assert part in page


def test_hostile_text_is_only_text(run: Run) -> None:
    page = html(run)
    assert HOSTILE not in page
    assert "&lt;script&gt;alert(" in page


def test_targets_of_inference_are_passed_or_failed(run: Run) -> None:
    assert "tokens/s, all prompts" not in html(run)
    targets = [
        {"target": "tokens_per_s", "wanted": 100.0, "measured": 88.0, "reached": False},
        {"target": "first_token_p50", "wanted": 0.5, "measured": 0.25, "reached": True},
    ]
    figures = {"tokens_per_s": 88.0, "first_token_p50": 0.25, "first_token_p95": 0.5, "prompts": 2, "engine": "torch"}
    write_json(run.samples_record(MAX_STEPS), figures | {"targets": targets})
    cells = re.findall(r"<td[^>]*>([^<]*)", own_part(html(run)))
    at = cells.index("tokens/s, all prompts together")
    assert cells[at : at + 4] == ["tokens/s, all prompts together", "88", "100", "failed"]
    assert cells[at + 4 : at + 8] == ["s to the first token, median", "0.25", "0.5", "passed"]


def test_ids_are_unique(run: Run) -> None:
    ids = re.findall(r'\bid="([^"]+)"', own_part(html(run)))
    assert len(ids) == len(set(ids))


def test_a_failed_run_says_so_on_top(run: Run) -> None:
    run.samples(MAX_STEPS).unlink()
    write_jobs(run, [job("pretrain", "2", 0) | {"state": "failed", "reason": "loss nan at step 7"}])
    page = own_part(html(run))
    assert page.index("loss nan at step 7") < page.index("<h2")


def test_a_run_that_has_only_begun_has_a_report(tmp_path: Path) -> None:
    run = Run(tmp_path / "new")
    write_text(run.config, "name: new\n")
    assert "new" in html(run)


def test_without_plotly_the_numbers_are_still_there(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    page = html(run)
    assert "pip install plotly" in page
    assert "<script" not in page
    assert "1.393" in page


def test_the_text_is_drawn_without_a_script_and_rubbish_is_left_out(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    page = html(run)
    assert page.count("<polyline") == 1
    assert "No text of the validation split is in the train split" in page
    assert "1.02\N{NO-BREAK SPACE}kB to 2.05\N{NO-BREAK SPACE}kB" in page
    (split := (index := read_json(run.index))["splits"]["train"])["document_lengths"] = [["x", 1], [0, 5], 3, [4]]
    split["token_frequencies"] = {"1": 2}
    write_json(run.index, index | {"in_both_splits": 2})
    page = html(run)
    assert "<polyline" not in page
    assert "2 texts are in both splits" in page


def test_curves_keep_their_ends_and_do_not_lag() -> None:
    assert thinned(10_000, 5) == [0, 2500, 5000, 7499, 9999]
    assert running_mean([float(9 - at) for at in range(10)]) == [float(9 - at) for at in range(10)]
