"""What the long scenarios came to, one row each; tests/faults/all.py prints them as one table at the end."""

from __future__ import annotations

import json
import os
from pathlib import Path
from xml.etree import ElementTree

VARIABLE = "FAULTS_ROWS"  # the file that rows are appended to; without it they are only printed by who makes them
PASSED, FAILED, SKIPPED = "passed", "FAILED", "not tried"


def add(scenario: str, passed: bool, detail: str = "", goodput: float | None = None) -> bool:
    """Note how a scenario went; return whether it passed."""
    _append(scenario, PASSED if passed else FAILED, detail, goodput)
    return passed


def skip(scenario: str, why: str) -> None:
    """Note that a scenario could not be tried here."""
    _append(scenario, SKIPPED, why)


def _append(scenario: str, result: str, detail: str, goodput: float | None = None) -> None:
    if path := os.environ.get(VARIABLE):
        row = {"scenario": scenario, "result": result, "detail": detail, "goodput": goodput}
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def read(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def of_pytest(path: Path) -> list[dict[str, object]]:
    """Return a row for each test of a JUnit file."""
    rows = []
    for case in ElementTree.parse(path).iter("testcase"):
        name = case.get("name", "").removeprefix("test_").replace("_", " ")
        module = case.get("classname", "").rpartition(".")[2].removeprefix("test_").replace("_", " ")
        problem = next((case.find(kind) for kind in ("failure", "error") if case.find(kind) is not None), None)
        skipped = case.find("skipped")
        result = FAILED if problem is not None else SKIPPED if skipped is not None else PASSED
        told = problem if problem is not None else skipped
        detail = (told.get("message") or "").split("\n")[0][:80] if told is not None else ""
        rows.append({"scenario": f"{module}: {name}", "result": result, "detail": detail, "goodput": None})
    return rows


def show(rows: list[dict[str, object]]) -> str:
    """Return the rows as a table, and a line that counts them."""
    cells = [("scenario", "result", "goodput", "")]
    for row in rows:
        goodput = f"{row['goodput']:.1%}" if isinstance(row["goodput"], float) else ""
        cells.append((str(row["scenario"]), str(row["result"]), goodput, str(row["detail"])))
    widths = [max(len(line[column]) for line in cells) for column in range(3)]
    lines = ["  ".join([*(c.ljust(w) for c, w in zip(line, widths, strict=False)), line[3]]).rstrip() for line in cells]
    failed = sum(row["result"] == FAILED for row in rows)
    passed = sum(row["result"] == PASSED for row in rows)
    return "\n".join([*lines, f"{passed} passed, {failed} failed, {len(rows) - passed - failed} not tried"])
