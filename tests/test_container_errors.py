"""What Pyxis and Enroot say of a container that did not start becomes node, cause and remedy."""

from __future__ import annotations

import pytest

from pipeline.image.container_errors import container_failure
from pipeline.run.decision import Attempt, after_attempt

END = """\
slurmstepd-{node}: error: pyxis: container was not started successfully by another task
slurmstepd-{node}: error: spank: required plugin spank_pyxis.so: task_init() failed with rc=-1
slurmstepd-{node}: error: Failed to invoke spank plugin stack
srun: error: {node}: task 0: Exited with exit code 1
"""


def log(text: str, *nodes: str) -> str:
    """Write what Pyxis writes on each of the nodes."""
    head = "slurmstepd-{node}: error: pyxis: failed to create container filesystem\n"
    head += "slurmstepd-{node}: error: pyxis: printing enroot log file:\n"
    return "".join((head + "slurmstepd-{node}: error: pyxis:     " + text + "\n" + END).format(node=n) for n in nodes)


CASES = {
    "full disk": (
        "mkdir: cannot create directory '/x': No space left on device", "environment",
        ["n2: Enroot has no room for the image: mkdir: cannot", "ENROOT_DATA_PATH"],
    ),
    "quota": ("write failed: Disk quota exceeded", "environment", ["n2: Enroot has no room"]),
    "folders": (
        "mkdir: cannot create directory '/run/user/7': Permission denied", "environment", ["ENROOT_RUNTIME_PATH"],
    ),
    "credentials": (
        "[ERROR] URL https://reg.example.org/v2/a/manifests/b returned error code: 401 Unauthorized", "config",
        ["the registry reg.example.org does not let you", "machine reg.example.org login", ".config/enroot/.credentials"],
    ),
    "no such image": ("[ERROR] URL https://x returned error code: 404 Not Found", "config", ["mend image"]),
    "no network": (
        "curl: (6) Could not resolve host: reg.example.org", "environment",
        ["from the registry reg.example.org: curl: (6) Could not resolve", "image: /shared/NAME.sqsh"],
    ),
    "cut off": ("FATAL ERROR: Failed to read superblock", "environment", ["copy or build it again"]),
    "damaged": ("[ERROR] Invalid image format: /x.sqsh", "environment", ["n2: the image is damaged", ": Invalid image"]),
    "missing": (
        "[ERROR] No such file or directory: /shared/x.sqsh", "environment",
        ["n2: the node does not see a file that it needs: No such file or directory: /shared/x.sqsh; look whether"],
    ),
    "mount": ("--container-mounts: source path does not exist: /data", "environment", ["does not exist: /data"]),
    "busy registry": (
        "[ERROR] URL https://reg.example.org/v2/a/blobs/b returned error code: 429 Too Many Requests", "environment",
        ["the registry reg.example.org is busy", "returned error code: 429 Too Many Requests; the next attempt waits"],
    ),
    "broken registry": (
        "[ERROR] URL https://reg.example.org/v2/ returned error code: 503 Service Unavailable", "environment",
        ["is busy or out of order for now: URL https://reg.example.org/v2/ returned error code: 503"],
    ),
    "busy registry, by curl": (
        "curl: (22) The requested URL returned error: 502", "environment", ["is busy or out of order for now: curl: (22)"],
    ),
    "limit of pulls": (
        "toomanyrequests: You have reached your unauthenticated pull rate limit.", "environment",
        ["is busy or out of order for now: toomanyrequests: You have reached"],
    ),
    "no fuse": ("fuse: device not found, try 'modprobe fuse' first", "environment", ["cannot mount the image", "/dev/fuse"]),
    "something else": ("the moon is full", "environment", ["n2: no container: failed to create"]),
}  # fmt: skip


@pytest.mark.parametrize(("text", "verdict", "parts"), CASES.values(), ids=CASES)
def test_a_failure_says_node_cause_and_remedy(text: str, verdict: str, parts: list[str]) -> None:
    found = container_failure(log(text, "n2"), "me@reg.example.org#a:b", ["n1", "n2"])
    assert found is not None
    assert found["verdict"] == verdict
    for part in parts:
        assert part in str(found["reason"])
    assert "me@" not in str(found["reason"])


def test_a_node_is_to_blame_only_where_others_do_better() -> None:
    text = "[ERROR] No such file or directory: /shared/x.sqsh"
    one = container_failure(log(text, "n2"), "/shared/x.sqsh", ["n1", "n2"])
    all_of_them = container_failure(log(text, "n1", "n2"), "/shared/x.sqsh", ["n1", "n2"])
    assert one is not None
    assert all_of_them is not None
    assert (one["nodes"], all_of_them["nodes"]) == (["n2"], [])
    assert str(all_of_them["reason"]).startswith("n1, n2: ")


BUSY = "[ERROR] URL https://reg/v2/x returned error code: 429 Too Many Requests"


@pytest.mark.parametrize(
    ("text", "blames"),
    [
        ("mkdir: cannot create directory '/x': No space left on device", True),
        ("[ERROR] No such file or directory: /shared/x.sqsh", True),
        ("squashfuse: failed to mount", True),
        (BUSY, False),
        ("[ERROR] URL https://x returned error code: 500", False),
        ("curl: (6) Could not resolve host: reg.example.org", False),
        ("[ERROR] Invalid image format: /x.sqsh", False),
        ("the moon is full", False),
    ],
)
def test_only_what_is_a_nodes_own_by_nature_is_blamed(text: str, blames: bool) -> None:
    found = container_failure(log(text, "n2"), "reg#x", ["n1", "n2", "n3"])
    assert found is not None
    assert (found["nodes"], found["sure"]) == (["n2"] * blames, False)
    alone = container_failure(log(text, "n2"), "reg#x", ["n2"])
    assert alone is not None
    assert alone["nodes"] == []
    trained_before = container_failure(log(text, "n2"), "reg#x", ["n2"], fine_before=True)
    assert trained_before is not None
    assert trained_before["nodes"] == ["n2"] * blames


def test_a_registry_that_is_busy_is_waited_for_and_not_counted_as_one_cause() -> None:
    attempts = []
    for number in range(5):
        found = container_failure(log(BUSY, f"n{number}"), "reg#x", [f"n{number}"])
        assert found is not None
        attempts.append(Attempt(str(number), 0, str(found["verdict"]), str(found["reason"]), -1, -1))
        decision = after_attempt(attempts[-1], attempts[:-1], stage="pretrain", stop=False)
        assert (decision.action, decision.delay) == ("go_on", 60 << number)


def test_a_line_of_any_length_makes_a_short_reason() -> None:
    found = container_failure(log("x" * 50_000, *[f"n{number}" for number in range(1000)]), "reg#x", ["n1"])
    assert found is not None
    assert len(str(found["reason"])) < 600


def test_a_node_without_pyxis_is_named() -> None:
    said = "srun: unrecognized option '--container-image=/shared/x.sqsh'\nTry \"srun --help\" for more information\n"
    found = container_failure(said, "/shared/x.sqsh", ["n1", "n2"])
    assert found is not None
    assert "no Pyxis on n1" in str(found["reason"])
    assert found["nodes"] == []  # no other node was asked
    trained_before = container_failure(said, "/shared/x.sqsh", ["n1", "n2"], fine_before=True)
    assert trained_before is not None
    assert trained_before["nodes"] == ["n1"]


def test_a_log_that_tells_of_something_else_is_left_to_others() -> None:
    assert container_failure("ValueError: x\nsrun: error: n1: task 0: Exited with exit code 1\n", "/x", ["n1"]) is None
