"""Jobs are kept off bad nodes, and never off so many that they would wait for ever."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from slurm_site import CLUSTER, Pipeline, Script, Site

from pipeline.files import read_lines
from pipeline.slurm.bad_nodes import BadNode, BadNodes
from pipeline.slurm.exclusion import exclude


@pytest.fixture
def site(tmp_path: Path, micro: Path, pipeline: Pipeline) -> Site:
    """A Slurm of three nodes."""
    site = Site(tmp_path, micro, pipeline)
    (site.folder / "nodes").write_text("n1 n2 n3")
    return site


def bad(site: Site, *names: str) -> BadNodes:
    """Put nodes on the list, each a second after the one before."""
    found = BadNodes(site.run.root.parent / ".ours")
    for age, name in enumerate(names):
        found.add([name], f"{name}: ECC errors", 1 + age / 3600, "x")
    return found


def nodes(*names: str) -> list[BadNode]:
    return [BadNode(name, "ECC", float(age), "x") for age, name in enumerate(names)]


@pytest.mark.parametrize(
    ("spare", "names", "allowed"),
    [(3, ["a", "b", "c"], []), (2, ["b", "c"], ["a"]), (1, ["c"], ["b", "a"]), (0, [], ["c", "b", "a"])],
)
def test_those_that_failed_last_are_excluded_first(spare: int, names: list[str], allowed: list[str]) -> None:
    found = exclude(nodes("a", "b", "c"), lambda wanted: len(wanted) <= spare)
    assert (found.names, [node.name for node in found.allowed]) == (names, allowed)


def test_a_list_that_is_not_what_is_in_the_way_stays_whole() -> None:
    found = exclude(nodes("a", "b"), lambda wanted: False)
    assert (found.names, found.allowed) == (["a", "b"], [])


def test_slurm_is_asked_nothing_where_no_node_is_bad(site: Site) -> None:
    site.submit()
    assert not any("--test-only" in line for line in (site.folder / "calls").read_text().splitlines())


def test_submit_uses_the_least_bad_nodes_and_says_so(site: Site) -> None:
    bad(site, "n1", "n2")
    done = site.submit("pretrain.nodes=2", "pretrain.micro_batch_size=1")
    assert done.returncode == 0, done.stderr
    assert {name: job["excluded"] for name, job in site.by_name().items()} == {
        "tokenize": "n1,n2", "pretrain": "n2", "evaluate": "n1,n2", "inference": "n1,n2",
    }  # fmt: skip
    assert "pretrain: nodes that failed before may be used again" in done.stderr
    assert "n1 (n1: ECC errors)" in done.stderr
    (event,) = [event for event in read_lines(site.run.events) if event["event"] == "bad nodes allowed"]
    assert (event["stage"], event["nodes"]) == ("pretrain", ["n1"])


def test_the_users_own_exclusion_stays(site: Site) -> None:
    site.cluster.write_text(CLUSTER.replace("account: lm", "account: lm, exclude: 'n[2-3]'"))
    bad(site, "n1")
    assert site.submit().returncode == 0
    assert site.by_name()["pretrain"]["excluded"] == "n2,n3"


def test_another_bad_node_never_leaves_the_rest_of_the_chain_without_nodes(site: Site) -> None:
    bad(site, "n1")
    site.submit("pretrain.nodes=2", "pretrain.micro_batch_size=1")
    site.tokenized()
    script = Script(site)
    time.sleep(0.01)
    assert script.begin("n2,n3").returncode == 0
    successor = Script(site)
    assert successor.job_id != script.job_id
    assert site.by_name()["pretrain"]["excluded"] == "n1"
    script.says("environment", "n2: 7 GPUs, 8 wanted", nodes=("n2",))
    ended = script.end(3, "n2,n3")
    assert site.by_name()["pretrain"]["excluded"] == "n2"
    assert "n1 (n1: ECC errors)" in ended.stderr
    site.set_id(script.job_id, "FAILED")
    assert successor.begin("n1,n3").returncode == 0  # it stays there


def test_status_says_that_the_list_keeps_a_job_waiting_and_resume_mends_it(site: Site) -> None:
    bad(site, "n3")
    site.submit("pretrain.nodes=2", "pretrain.micro_batch_size=1")
    site.set("tokenize", "COMPLETED")
    (site.folder / "nodes").write_text("n1 n3")
    site.set("pretrain", "PENDING", reason="ReqNodeNotAvail, UnavailableNodes:n2", dependency="")
    shown = " ".join(site.verb("status", site.run.root).stdout.split())
    assert "too few nodes are left without n3, which it is kept off" in shown
    assert "(now: n2)" in shown
    assert "resume runs/micro (anew which bad nodes may be used)" in shown
    resumed = site.verb("resume", site.run.root)
    assert resumed.returncode == 0, resumed.stderr
    assert site.by_name()["pretrain"]["excluded"] == ""
    assert "n3 (n3: ECC errors)" in resumed.stderr
    assert json.loads(site.verb("status", site.run.root, "--json").stdout)["jobs"][1]["waits_for"] == "Priority"
