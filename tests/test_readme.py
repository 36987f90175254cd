"""What the documentation says is there is there, and every shipped config loads."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PROJECT, environment

from pipeline.config.docs import config_reference
from pipeline.config.load import load_config

README = (PROJECT / "README.md").read_text(encoding="utf-8")
PAGES = [
    PROJECT / "README.md",
    PROJECT / "CONTRIBUTING.md",
    PROJECT / "SECURITY.md",
    *sorted((PROJECT / "docs").glob("*.md")),
]
CONFIGS = sorted((PROJECT / "configs").glob("*.yaml"))


def tree_paths() -> list[str]:
    """List the paths of README's annotated tree."""
    block = re.search(r"<!-- tree -->\n```\n(.*?)```", README, re.DOTALL)
    assert block is not None
    found, folders = [], [""]
    for line in block[1].splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        name = line.split()[0]
        folders[depth + 1 :] = [folders[depth] + name] if name.endswith("/") else []
        found.append(folders[depth] + name)
    return found


@pytest.mark.parametrize("path", tree_paths())
def test_tree_names_what_exists(path: str) -> None:
    assert (PROJECT / path).exists()


def test_tree_names_every_folder_of_the_top() -> None:
    tracked = subprocess.run(["git", "ls-files"], capture_output=True, text=True, cwd=PROJECT, check=True).stdout
    folders = {line.split("/")[0] + "/" for line in tracked.splitlines() if "/" in line and not line.startswith(".")}
    assert folders <= set(tree_paths())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_sessions_and_verbs_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    help_text = subprocess.run(
        [sys.executable, "-m", "pipeline", "--help"], capture_output=True, text=True, env=environment(), check=True
    ).stdout
    noxfile = (PROJECT / "noxfile.py").read_text(encoding="utf-8")
    for session in re.findall(r"nox -s (\w+)", text):
        assert f"def {session}(" in noxfile
    for verb in re.findall(r"python -m pipeline (\w+)", text):
        assert re.search(rf"^\W+{verb}\b", help_text, re.MULTILINE), verb


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_shipped_config_loads(path: Path) -> None:
    assert load_config(path).name == path.stem


def test_config_reference_is_up_to_date() -> None:
    page = PROJECT / "docs" / "config.md"
    assert page.read_text(encoding="utf-8") == config_reference(), "write it anew: see CONTRIBUTING.md"


def test_each_promise_of_security_names_tests_that_are_there() -> None:
    text = (PROJECT / "SECURITY.md").read_text(encoding="utf-8")
    promised = re.search(r"## What is promised\n(.*?)\n## ", text, re.DOTALL)
    assert promised is not None
    promises = re.split(r"^\d+\. ", promised[1], flags=re.MULTILINE)[1:]
    assert len(promises) >= 6
    for promise in promises:
        named = re.findall(r"\]\((tests/[\w/]+\.py)\)", promise)
        assert named, promise
        assert all("def test_" in (PROJECT / path).read_text(encoding="utf-8") for path in named)
