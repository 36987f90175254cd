"""The preflight stage in real processes. Its slow half: tests/faults/test_preflight_nodes.py."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import environment
from preflight_nodes import Nodes, make_run, nodes

from pipeline.files import read_json, read_lines, write_text
from pipeline.run.cause import cause_of
from pipeline.run.folder import Run

__all__ = ["nodes"]  # a fixture

SMI = """#!/bin/sh
case $1 in
--query-gpu*) echo "0, GPU-0, H100, 550.54, 4, 81559, {ecc}, 0x0";;
esac
"""


def test_two_ranks_by_torchrun_and_the_table_of_the_session(
    micro: Path, tmp_path: Path, pipeline: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    (tmp_path / "bin").mkdir()
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.write_text(SMI.format(ecc=0))
    smi.chmod(0o755)
    path = f"{smi.parent}:{os.environ['PATH']}"
    words = ("submit", micro, "--cluster", "local", "--only", "preflight", "pretrain.nproc_per_node=2")
    good = pipeline(*words, PATH=path)
    assert good.returncode == 0, good.stderr
    assert "all-reduce over 2 ranks (gloo)" in good.stderr
    run = Run(tmp_path / "runs" / "micro")
    report = read_json(run.preflight("0", 0))
    assert report["ok"]
    assert report["nodes"][0]["smi"]["driver"] == "550.54"
    assert report["nodes"][0]["local_gbps"] > 0
    assert [rank["variables"]["GLOO_SOCKET_IFNAME"] for rank in report["ranks"]] == ["lo", "lo"]
    assert not run.preflight_records("0", 0).exists()
    assert read_json(run.verdict("0", 0))["verdict"] == "complete"
    assert not list(run.root.rglob("*.tmp"))

    smi.write_text(SMI.format(ecc=2))
    bad = pipeline(*words, PATH=path)
    assert bad.returncode == 1
    verdict = read_json(run.verdict("0", 1))
    assert (verdict["verdict"], verdict["nodes"]) == ("environment", [])  # one node: nothing to compare it with
    findings = read_json(run.preflight("0", 1))["findings"]
    assert (socket.gethostname(), "gpu fault") in [(finding["node"], finding["kind"]) for finding in findings]
    assert "GPU 0: 2 uncorrected ECC errors" in bad.stderr
    assert "first error" not in bad.stderr  # torchrun adds a traceback of its own


def test_the_job_script_runs_by_hand_and_exits_3(micro: Path) -> None:
    run = make_run(micro, "preflight.min_free_bytes=999_999_999_999_999")
    script = run.snapshot / "sbatch" / "preflight.sbatch"
    done = subprocess.run(
        ["bash", str(script), str(run.root)], capture_output=True, text=True, env=environment(), timeout=90, check=False
    )
    assert done.returncode == 3, done.stderr
    assert "the Run's folder has" in done.stderr
    assert read_json(run.verdict("hand-preflight", 0))["verdict"] == "environment"


def test_two_nodes_and_a_step_that_leaves_the_verdict_to_training(nodes: Callable[..., Nodes]) -> None:
    two = nodes()
    write_text(two.run.sinfo("7", 0), "n[1-2] 2 1000 (null) gpu:2\n")
    two.start(1)
    two.start(0)
    assert two.end() == {1: 0, 0: 0}, two.log(0).read_text()
    assert [node["node"] for node in two.report["nodes"]] == ["n1", "n2"]
    assert two.report["all_reduce"]["bus_gbps"] > 0
    assert two.said == {}
    assert [event["event"] for event in read_lines(two.run.events)] == ["start", "complete"]


def test_a_node_that_never_arrives_is_named(nodes: Callable[..., Nodes]) -> None:
    two = nodes("preflight.timeout=4")
    two.start(0)
    assert two.end() == {0: 3}
    assert two.said["nodes"] == ["n2"]
    assert "n2: did not arrive within 4 s" in two.said["reason"]


def test_a_variable_that_is_another_one_in_one_rank(nodes: Callable[..., Nodes]) -> None:
    two = nodes()
    expected = '{"NCCL_IB_TIMEOUT": "22", "NCCL_DEBUG": "WARN"}'
    two.start(0, NCCL_DEBUG="WARN", NCCL_IB_TIMEOUT="22", PIPELINE_EXPECTED_ENV=expected)
    two.start(1, NCCL_DEBUG="INFO", NCCL_IB_TIMEOUT="22", PIPELINE_EXPECTED_ENV=expected)
    assert two.end()[0] == 3
    assert two.said["nodes"] == ["n2"]
    assert "NCCL_DEBUG is 'INFO' on rank 1 (n2), and 'WARN' in the launch file" in two.said["reason"]


def test_a_wrong_variable_that_all_nodes_have_blames_none_of_them(nodes: Callable[..., Nodes]) -> None:
    two = nodes()
    expected = '{"GLOO_SOCKET_IFNAME": "eth77"}'
    for rank in (1, 0):
        two.start(rank, GLOO_SOCKET_IFNAME="eth77", PIPELINE_EXPECTED_ENV=expected)
    assert set(two.end().values()) == {3}
    assert (two.said["verdict"], two.said["nodes"]) == ("environment", [])
    assert "joining the process group: RuntimeError" in two.said["reason"]
    keys = {cause_of("environment", two.said["reason"].replace("n1", name)) for name in ("n1", "n7", "n3")}
    assert len(keys) == 1  # so that the next attempt, elsewhere, is the second of the same cause


@pytest.mark.parametrize("how", ["signal", "warning"])
def test_a_stop_ends_it_at_once(nodes: Callable[..., Nodes], how: str) -> None:
    two = nodes("preflight.timeout=600")
    two.start(0)
    two.wait_for_record("waiting for the others")
    if how == "signal":
        two.processes[0].send_signal(signal.SIGTERM)
    else:
        two.run.warned("7", 0).write_text("USR2\n")
    assert two.end(30) == {0: 0}
    assert two.said["verdict"] == "stopped"
