"""What Pyxis and Enroot say of a container that did not start becomes node, cause and remedy."""

from __future__ import annotations

import pytest

from pipeline.image.container_errors import container_failure

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


def test_a_node_without_pyxis_is_named() -> None:
    said = "srun: unrecognized option '--container-image=/shared/x.sqsh'\nTry \"srun --help\" for more information\n"
    found = container_failure(said, "/shared/x.sqsh", ["n1", "n2"])
    assert found is not None
    assert "no Pyxis on n1" in str(found["reason"])
    assert found["nodes"] == ["n1"]


def test_a_log_that_tells_of_something_else_is_left_to_others() -> None:
    assert container_failure("ValueError: x\nsrun: error: n1: task 0: Exited with exit code 1\n", "/x", ["n1"]) is None
