"""Nodes that hold up a preflight in ways that take their time; the quick half is tests/test_preflight_stage.py."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable

from preflight_nodes import Nodes, nodes

__all__ = ["nodes"]  # a fixture


def test_a_head_that_never_arrives_is_named_by_the_others(nodes: Callable[..., Nodes]) -> None:
    two = nodes("preflight.timeout=3")
    two.start(1)
    assert two.end() == {1: 3}
    assert (two.said["verdict"], two.said["nodes"]) == ("environment", ["n1"])
    assert "Connection refused [errno 111]" in two.said["reason"]


def test_a_taken_port_is_told(nodes: Callable[..., Nodes]) -> None:
    two = nodes("preflight.timeout=5")
    with socket.create_server(("", two.port)):
        two.start(0)
        assert two.end() == {0: 3}
    assert f"port {two.port}: Address already in use" in two.said["reason"]


def test_a_rank_that_dies_in_the_middle_does_not_hold_the_others(nodes: Callable[..., Nodes]) -> None:
    two = nodes("preflight.timeout=6")
    two.start(0)
    two.start(1, PATH="/nowhere")  # no nvidia-smi there: fine where no GPU is asked for
    two.wait_for_record("n2")
    two.processes[1].send_signal(signal.SIGSTOP)
    assert two.processes[0].wait(60) == 3
    assert two.said["nodes"] == ["n2"]


def test_a_head_whose_name_does_not_resolve_on_one_node(nodes: Callable[..., Nodes]) -> None:
    two = nodes("preflight.timeout=16")
    two.start(0)
    two.start(1, MASTER_ADDR="nope.invalid")
    assert two.end() == {0: 3, 1: 3}, two.log(1).read_text()
    assert two.said["nodes"] == ["n2"]
    assert "nope.invalid" in two.said["reason"]
    assert "the name cannot be resolved" in two.said["reason"]
