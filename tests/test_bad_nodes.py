"""The shared list of bad nodes: one's own words count, a stranger's advise, and nobody's can break what reads them."""

from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path
from typing import Any

import pytest
from slurm_site import Pipeline, Script, Site

from pipeline.slurm.bad_nodes import MOST_FILES, MOST_HOURS, BadNodes

STRANGER = 65534
AS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="gives files to another user")


@pytest.fixture
def site(tmp_path: Path, micro: Path, pipeline: Pipeline) -> Site:
    return Site(tmp_path, micro, pipeline)


def entry(name: object = "n1", **changes: Any) -> str:
    return json.dumps({"node": name, "reason": "ECC", "until": time.time() + 3600, "run": "x"} | changes) + "\n"


def by_stranger(path: Path, *lines: str, mode: int = 0o644) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines))
    os.chown(path, STRANGER, STRANGER)
    path.chmod(mode)
    return path


@AS_ROOT
def test_what_a_stranger_says_advises_and_keeps_nobody_off(site: Site) -> None:
    listed = BadNodes(site.run.root.parent / ".ours")
    by_stranger(listed.folder / "root.jsonl", entry("n1", reason="\x1b[2J[/x] mine"), entry("n2"))
    listed.add(["n7"], "GPU lost", 1, "mine")
    assert list(listed.read()) == ["n7"]
    assert {node.name: node.by for node in listed.advice()} == {"n1": "nobody", "n2": "nobody"}
    site.submit()
    assert all(job["excluded"] == "n7" for job in site.queue.values())
    told = [line for line in site.verb("status", site.run.root).stdout.splitlines() if line.startswith("bad node")]
    assert len(told) == 3
    assert "␛[2J[/x] mine (only nobody says so, and Jobs may use it)" in told[0]
    assert "\x1b" not in "".join(told)


@AS_ROOT
def test_a_file_in_ones_own_name_that_a_stranger_made_is_not_written_to(tmp_path: Path) -> None:
    listed = BadNodes(tmp_path, 0o1777)
    target = tmp_path / "precious"
    target.write_text("")
    listed.folder.mkdir()
    (listed.folder / "root.jsonl").symlink_to(target)
    for number in (1, 2):
        listed.add([f"n{number}"], "ECC", 1, "mine")
    assert target.read_text() == ""
    assert list(listed.read()) == ["n1", "n2"]
    assert len(list(listed.folder.glob("root-*.jsonl"))) == 1


@AS_ROOT
def test_a_stranger_cannot_take_back_what_one_has_said(tmp_path: Path) -> None:
    listed = BadNodes(tmp_path)
    listed.add(["n1"], "ECC", 1, "mine")
    by_stranger(listed.folder / "zzz.jsonl", entry("n1", reason="withdrawn", until=0, run="mine"))
    assert list(listed.read()) == ["n1"]


def test_where_others_may_write_they_have_a_place_that_is_theirs(tmp_path: Path) -> None:
    shared, alone = BadNodes(tmp_path / "team", 0o1777), BadNodes(tmp_path / "mine")
    former = os.umask(0o077)
    try:
        for listed in (shared, alone):
            listed.add(["n1"], "ECC", 1, "x")
    finally:
        os.umask(former)
    modes = [stat.S_IMODE(listed.folder.stat().st_mode) for listed in (shared, alone)]
    assert modes == [0o1777, 0o755]
    (own,) = shared.folder.iterdir()
    assert not stat.S_IMODE(own.stat().st_mode) & 0o022


WRONG = {
    "until the end of time": entry("n1", until=1e300),
    "until never": '{"node": "n1", "until": NaN}\n',
    "until text": entry("n1", until="tomorrow"),
    "no node": entry(None),
    "an option": entry("--uid=0"),
    "several": entry("n[1-900]"),
    "a list": "[1, 2]\n",
    "deep": "[" * 100_000 + "\n",
    "binary": "\x00\x01\x02\n",
}


@pytest.mark.parametrize("line", WRONG.values(), ids=WRONG)
def test_an_entry_that_is_none_breaks_nothing(site: Site, line: str) -> None:
    site.submit()
    listed = BadNodes(site.run.root.parent / ".ours")
    listed.folder.mkdir(parents=True)
    (listed.folder / "any.jsonl").write_text(line + entry("n9"))
    found = listed.read()
    assert all(node.until <= time.time() + MOST_HOURS * 3600 for node in found.values())
    assert {"n9"} <= found.keys() <= {"n1", "n9"}
    shown = site.verb("status", site.run.root)
    assert "Traceback" not in shown.stderr
    assert "bad node n9 until" in shown.stdout


def test_what_is_no_plain_file_is_passed_over(tmp_path: Path) -> None:
    listed = BadNodes(tmp_path)
    listed.folder.mkdir()
    os.mkfifo(listed.folder / "a.jsonl")
    (listed.folder / "b.jsonl").mkdir()
    (listed.folder / "c.jsonl").symlink_to("/dev/zero")
    (listed.folder / "d.jsonl").write_text(entry("n1"))
    (listed.folder / "d.jsonl").chmod(0o666)  # anybody's, so nobody's
    (listed.folder / "e.jsonl").write_text(entry("n2"))
    assert list(listed.read()) == ["n2"]
    assert MOST_FILES >= 5


def test_the_single_file_of_before_is_read(tmp_path: Path) -> None:
    listed = BadNodes(tmp_path)
    listed.former.write_text(entry("n1") + entry("n2"))
    listed.withdraw(["n2"], "x")
    assert list(listed.read()) == ["n1"]
    listed.former.chmod(0o666)
    assert list(listed.read()) == []
    assert {node.by for node in listed.advice()} == {"somebody"}


@pytest.mark.parametrize("what", ["the list", "the events"])
def test_an_attempt_ends_as_ever_where_that_cannot_be_written(site: Site, what: str) -> None:
    site.submit()
    site.tokenized()
    script = Script(site)
    assert script.begin("n1,n2").returncode == 0
    if what == "the list":  # a file is in its place: OSError for everybody, root too
        (site.run.root.parent / ".ours").write_text("")
    else:
        site.run.events.unlink(missing_ok=True)
        site.run.events.mkdir()
    script.says("environment", "n2: 7 GPUs, 8 wanted", nodes=("n2",))
    ended = script.end(3, "n1,n2")
    assert ended.returncode == 3, ended.stderr
    assert script.verdict["verdict"] == "environment"
    assert ("put nodes on the list" if what == "the list" else "note the event") in ended.stderr
    assert site.states("pretrain")[-1] == "PENDING"  # the successor waits
