"""The rules of preflight, on records that the tests make up, and the answers of fake nvidia-smis."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline.config.preflight import PreflightConfig
from pipeline.preflight.findings import (
    AllReduce,
    IbDevice,
    Master,
    NodeRecord,
    RankRecord,
    Report,
    Wanted,
    table,
)
from pipeline.preflight.merge import judge, judge_hang
from pipeline.preflight.node import connect, look_around
from pipeline.preflight.nvidia_smi import Gpu, Holder, Smi, ask_nvidia_smi
from pipeline.preflight.rules import matching_devices
from pipeline.slurm.gres import registered_gres

GIB = 1 << 30
GOOD_LINE = "{index}, GPU-{index}, NVIDIA H100 80GB HBM3, 550.54.15, 4, 81559, 0, 0x0000000000000001"
IB = {"NCCL_IB_DISABLE": "0", "NCCL_IB_HCA": "mlx5"}


# nvidia-smi, as a fake command on PATH
def fake_smi(folder: Path, gpus: str, apps: str = "", *, first: str = "", status: int = 0) -> None:
    script = folder / "nvidia-smi"
    script.write_text(
        f"#!/bin/sh\n{first}\ncase $1 in\n--query-gpu*) cat <<'END'\n{gpus}\nEND\nexit {status};;\n"
        f"*) cat <<'END'\n{apps}\nEND\nesac\n"
    )
    script.chmod(0o755)


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def test_healthy_gpus(commands: Path) -> None:
    fake_smi(commands, "\n".join(GOOD_LINE.format(index=index) for index in range(2)))
    smi = ask_nvidia_smi()
    assert (smi.state, smi.driver, len(smi.gpus)) == ("ok", "550.54.15", 2)
    assert smi.gpus[1] == Gpu(
        index=1, uuid="GPU-1", name="NVIDIA H100 80GB HBM3", used_mib=4, total_mib=81559, ecc_errors=0
    )


def test_errors_slowdowns_and_holders(commands: Path) -> None:
    fake_smi(
        commands,
        "0, GPU-0, A100, 535.1, 60000, 81920, 3, 0x0000000000000048\n1, GPU-1, A100, 535.1, [N/A], [N/A], [N/A], 0x4",
        "GPU-0, 4711, 59000\nGPU-0, 4712, [N/A]",
    )
    first, second = ask_nvidia_smi().gpus
    assert (first.ecc_errors, first.slowdowns) == (3, ["hardware slowdown", "hardware thermal slowdown"])
    assert first.holders == [Holder(pid=4711, mib=59000), Holder(pid=4712, mib=None)]
    assert (second.used_mib, second.ecc_errors, second.slowdowns) == (None, None, [])


def test_an_older_driver_is_asked_in_its_own_words(commands: Path) -> None:
    refused = 'case $1 in *clocks_event*) echo "Field \\"clocks_event_reasons.active\\" is not a valid field to query."; exit 2;; esac'
    fake_smi(commands, GOOD_LINE.format(index=0), first=refused)
    assert ask_nvidia_smi().state == "ok"


def test_a_lost_gpu(commands: Path) -> None:
    fake_smi(commands, "Unable to determine the device handle for GPU0000:41:00.0: GPU is lost. Reboot", status=15)
    smi = ask_nvidia_smi()
    assert smi.state == "failed"
    assert "exit 15: Unable to determine the device handle" in smi.message


def test_absent_and_not_understood(commands: Path) -> None:
    assert ask_nvidia_smi().state == "absent"
    fake_smi(commands, "No devices were found")
    assert ask_nvidia_smi().state == "failed"


def test_one_that_hangs_is_left_behind(commands: Path) -> None:
    fake_smi(commands, "", first="exec sleep 600")
    smi = ask_nvidia_smi(seconds=0.5)
    assert (smi.state, smi.message) == ("hung", "no answer within 0.5 s")


# GRES
SINFO = """\
NODELIST             CPUS       MEMORY     AVAIL_FEATURES            GRES
n[1-2,04]            128        1000000    (null)                    gpu:h100:8(S:0-1)
n3                   128        1000000    (null)                    (null)
slurm-worker-of-a-lo 64         500000     ib                        gpu:4
"""


def test_gres_is_found_for_each_node() -> None:
    nodes = ["n1", "n2", "n3", "n04", "n5", "slurm-worker-of-a-long-name-0"]
    found = registered_gres(SINFO, nodes)
    assert found == {
        "n1": "gpu:h100:8(S:0-1)",
        "n2": "gpu:h100:8(S:0-1)",
        "n04": "gpu:h100:8(S:0-1)",
        "n3": "(null)",
        "slurm-worker-of-a-long-name-0": "gpu:4",
    }


# rules for one node
def gpu(**changes: object) -> Gpu:
    fields = {"index": 3, "uuid": "GPU-a", "name": "H100", "used_mib": 4, "total_mib": 81559, "ecc_errors": 0}
    return Gpu.model_validate(fields | changes)


def node(name: str = "n1", rank: int = 0, **changes: object) -> NodeRecord:
    record = NodeRecord(
        node=name, rank=rank, pid=100 + rank, ready=True, doing="waiting for rank 0's word", boot_id=name,
        load=0.1, cores=64, shm_free=500 * GIB, free_bytes=500 * GIB, uverbs=True, cuda=True, gpus=["H100"],
        gpu_uuids=["a"], smi=Smi(state="ok", driver="550", gpus=[gpu()]), sees_token=True, skew=0.0,
        ib_devices=[IbDevice(name="mlx5_0", active=True)],
    )  # fmt: skip
    return record.model_copy(update=changes)


def rank(number: int = 0, name: str = "n1", **changes: object) -> RankRecord:
    record = RankRecord(
        rank=number, local_rank=0, world_size=2, local_world_size=1, node=name, pid=100 + number, device="GPU a"
    )
    return record.model_copy(update=changes)


def wanted(**changes: object) -> Wanted:
    fields: dict[str, object] = {"limits": PreflightConfig(), "nproc_per_node": 1, "free_bytes": 10 * GIB}
    return Wanted(**(fields | {"gpus_per_node": 1, "nodes": ["n1", "n2"], "world_size": 2} | changes))  # type: ignore[arg-type]


def causes(report: Report) -> list[str]:
    return [str(finding).replace("\N{NO-BREAK SPACE}", " ") for finding in report.findings]


FOREIGN = gpu(index=5, uuid="GPU-other", used_mib=80000)
BAD = {
    "no driver": ({"smi": Smi(state="absent")}, "nvidia-smi: is not in the container"),
    "hung driver": ({"smi": Smi(state="hung", message="no answer within 30 s")}, "nvidia-smi: no answer within 30 s"),
    "no CUDA": ({"cuda": False, "gpus": [], "gpu_uuids": []}, "torch.cuda.is_available() is False, but 1 are asked"),
    "ECC": ({"smi": Smi(state="ok", gpus=[gpu(ecc_errors=2)])}, "GPU 3: 2 uncorrected ECC errors"),
    "slowdown": ({"smi": Smi(state="ok", gpus=[gpu(slowdowns=["power brake"])])}, "GPU 3: power brake"),
    "lost": ({"smi": Smi(state="ok", gpus=[gpu(fault="GPU is lost")])}, "GPU 3: GPU is lost"),
    "busy": (
        {"smi": Smi(state="ok", gpus=[gpu(used_mib=14000, holders=[Holder(pid=4711, mib=13900)])])},
        "GPU 3: 14,000 MiB are held by pid 4711",
    ),
    "no InfiniBand": ({"variables": IB, "ib_devices": []}, "asks for InfiniBand, but /sys/class/infiniband has no"),
    "other devices": ({"variables": IB | {"NCCL_IB_HCA": "=mlx5_9"}}, "names none of the devices here: mlx5_0"),
    "port down": ({"variables": IB, "ib_devices": [IbDevice(name="mlx5_0", active=False)]}, "no port is active"),
    "no verbs": ({"variables": IB, "uverbs": False}, "no /dev/infiniband/uverbs*"),
    "memlock": ({"variables": IB, "memlock": 64 << 10}, "locked memory is limited to 65.5 kB"),
    "folder": ({"sees_token": False}, "does not see the file that rank 0 wrote"),
    "folder, other way": ({"is_seen": False}, "rank 0 does not see the file that it wrote"),
    "disk": ({"free_bytes": GIB}, "the Run's folder has 1.07 GB free, 10.7 GB are needed"),
    "master": (
        {"master": Master(name="head", port=2, addresses=["10.0.0.1"], errno=111, error="refused", seconds=30.2)},
        "no TCP connection to rank 0 at head:2 (10.0.0.1) within 30 s: refused [errno 111]",
    ),
    "no container": ({"contained": False}, "runs on the node itself, and not in the image; have Pyxis loaded there"),
    "clock": ({"skew": 600.0}, "its clock is 600.0 s ahead of the other nodes'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_node_is_named_and_good_ones_are_not(name: str) -> None:
    changes, text = BAD[name]
    report = judge(
        [node("n1"), node("n2", 1, **changes), node("n3", 2)],
        [rank(number, f"n{number + 1}", world_size=3) for number in range(3)],
        wanted(nodes=[], world_size=3),
    )
    assert report.bad_nodes == ["n2"]
    assert any(cause.startswith("n2: ") and text in cause for cause in causes(report)), causes(report)
    assert all(finding.remedy for finding in report.errors)


def test_an_exceptions_words_blame_no_node() -> None:
    report = judge([node("n1"), node("n2", 1, error="RuntimeError: no")], [rank(0), rank(1, "n2")], wanted())
    assert causes(report) == ["n2: RuntimeError: no; read the traceback in the log"]
    assert report.bad_nodes == []


def test_a_cpu_build_of_torch_is_the_interpreters_fault() -> None:
    bare = {"cuda": False, "gpus": [], "gpu_uuids": [], "torch": "2.9.0+cpu", "cuda_build": False}
    for nodes in ([node("n1", **bare)], [node("n1"), node("n2", 1, **bare), node("n3", 2)]):
        report = judge(nodes, [], wanted(nodes=[]))
        assert report.bad_nodes == []
        (cause,) = causes(report)
        assert "torch 2.9.0+cpu is built without CUDA, and 1 GPUs are asked for; name a python" in cause


def test_a_rank_0_that_nobody_reaches_or_sees_blames_nobody_else() -> None:
    """It always sees itself, so it does not show that the others are wrong."""
    refused = {"master": Master(name="head", port=2, addresses=["10.0.0.1"], errno=111, error="refused", seconds=30)}
    for changes in (refused, {"sees_token": False}):
        report = judge([node("n1"), node("n2", 1, **changes), node("n3", 2, **changes)], [], wanted(nodes=[]))
        assert report.errors
        assert report.bad_nodes == []


def test_most_nodes_are_never_blamed() -> None:
    full = [node(f"n{number}", number, shm_free=number, gpus=["H100"] * 2) for number in range(3)]
    two = wanted(nodes=[], nproc_per_node=2, gpus_per_node=2)
    assert judge([*full, node("n4", 4, gpus=["H100"] * 2), node("n5", 5, gpus=["H100"] * 2)], [], two).bad_nodes == []


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"memlock": 64 << 10},  # matters with InfiniBand only
        {"ib_devices": [], "variables": {"NCCL_IB_DISABLE": "1", "NCCL_IB_HCA": "mlx5"}},
        {"shm_free": 64 << 20},  # one rank has nobody to share memory with
        {"smi": Smi(state="ok", gpus=[gpu(), FOREIGN])},  # a GPU that another job has
        {"memlock": None, "variables": IB},
        {"skew": 4.0},
    ],
)
def test_what_is_no_fault(changes: dict[str, object]) -> None:
    report = judge([node("n1"), node("n2", 1, **changes)], [rank(0), rank(1, "n2")], wanted())
    assert causes(report) == []


def test_a_node_without_gpus_is_fine_where_none_are_asked_for() -> None:
    bare = {"smi": Smi(state="absent"), "cuda": False, "gpus": [], "gpu_uuids": [], "shm_free": 0}
    report = judge([node("n1", **bare), node("n2", 1, **bare)], [rank(0), rank(1, "n2")], wanted(gpus_per_node=0))
    assert causes(report) == []


def test_shared_memory_for_several_ranks() -> None:
    eight = wanted(nproc_per_node=8, gpus_per_node=8, nodes=["n1"], world_size=8)
    full = node("n1", gpus=["H100"] * 8, shm_free=64 << 20)
    report = judge([full], [rank(0, local_world_size=8, world_size=8)], eight)
    assert "/dev/shm has 67.1 MB free, 8 ranks with NCCL want 1.07 GB" in causes(report)[0]


def test_too_few_gpus_are_told_with_what_slurm_has_registered() -> None:
    asked = wanted(gpus_per_node=8, nproc_per_node=8, gres={"n1": "gpu:h100:8", "n2": "gpu:h100:4"})
    eight, seven = ["H100"] * 8, ["H100"] * 7
    report = judge([node("n1", gpus=seven), node("n2", 8, gpus=eight)], [], asked)
    assert "n1: torch sees 7 GPUs, but 8 are asked for (GRES registered: gpu:h100:8)" in causes(report)[0]
    assert "n2: 8 GPUs are asked for, but Slurm has registered gpu:h100:4" in causes(report)[1]


@pytest.mark.parametrize(
    ("gres", "name", "told"),
    [
        ("gpu:a100:1", "NVIDIA H100 80GB HBM3", True),
        ("gpu:h100:1", "NVIDIA H100 80GB HBM3", False),
        ("gpu:a100_1g.5gb:1", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", False),
        ("gpu:h100:1,gpu:a100:1", "NVIDIA A100 80GB PCIe", False),
        ("gpu:volta:1", "Tesla V100", False),  # a site's own word
        ("gpu:1", "NVIDIA H100 80GB HBM3", False),
    ],
)
def test_gpus_that_are_others_than_slurm_has_registered_are_a_warning(gres: str, name: str, told: bool) -> None:
    report = judge([node("n1", gpus=[name]), node("n2", 1)], [rank(0), rank(1, "n2")], wanted(gres={"n1": gres}))
    expected = f"n1: its GPUs are {name}, and Slurm has registered {gres}"
    assert [(finding.level, finding.node) for finding in report.findings] == [("warning", "n1")] * told
    assert all(expected in cause for cause in causes(report))


def test_what_all_nodes_have_is_nobody_s_fault() -> None:
    full = {"free_bytes": GIB}
    report = judge([node("n1", **full), node("n2", 1, **full)], [rank(0), rank(1, "n2")], wanted())
    assert report.bad_nodes == []
    assert causes(report)[0].startswith("all 2 nodes: the Run's folder has")
    alone = judge([node("n1", **full)], [rank(0, world_size=1)], wanted(nodes=[], world_size=1))
    assert causes(alone)[0].startswith("n1: the Run's folder has")
    assert alone.bad_nodes == []  # nothing to compare it with; the host compares it with earlier attempts


@pytest.mark.parametrize(
    ("hca", "chosen"),
    [("mlx5", ["mlx5_0", "mlx5_10", "mlx5_1"]), ("=mlx5_1", ["mlx5_1"]), ("mlx5_1:1", ["mlx5_10", "mlx5_1"]), ("^=mlx5_1", ["mlx5_0", "mlx5_10"])],
)  # fmt: skip
def test_hca_filters_as_nccl_reads_them(hca: str, chosen: list[str]) -> None:
    devices = [IbDevice(name=name, active=True) for name in ("mlx5_0", "mlx5_10", "mlx5_1")]
    assert [device.name for device in matching_devices(hca, devices)] == chosen


# nodes and ranks together
def test_a_node_that_did_not_arrive() -> None:
    report = judge([node("n1")], [rank(0)], wanted(), timed_out=True)
    assert report.bad_nodes == ["n2"]
    assert "n2: did not arrive within 180 s" in causes(report)[0]


def test_a_node_that_hangs_is_known_by_its_last_words() -> None:
    stuck = node("n2", 1, ready=False, doing="asking nvidia-smi")
    report = judge([node("n1"), stuck], [rank(0)], wanted(), timed_out=True)
    assert report.bad_nodes == ["n2"]
    assert "n2: got no further within 180 s than: asking nvidia-smi" in causes(report)[0]


def test_a_rank_that_did_not_arrive_on_a_node_that_did() -> None:
    two = wanted(nproc_per_node=2, nodes=["n1", "n2"], world_size=4, gpus_per_node=0)
    ranks = [rank(number, f"n{number // 2 + 1}", local_world_size=2, world_size=4, device=f"cpu:{number}") for number in (0, 1, 2)]  # fmt: skip
    report = judge([node("n1"), node("n2", 2)], ranks, two, timed_out=True)
    assert report.bad_nodes == ["n2"]
    assert "did not hear of rank 3" in causes(report)[0]


def test_a_hang_in_the_all_reduce_names_the_node_that_is_behind() -> None:
    ahead = node("n1", doing="all-reduce")
    report = judge_hang([ahead, node("n2", 1, doing="joining the process group")], wanted(), "all-reduce")
    assert report.bad_nodes == ["n2"]
    together = judge_hang([ahead, node("n2", 1, doing="all-reduce")], wanted(), "all-reduce")
    assert together.bad_nodes == []
    assert "all nodes wait within 180 s in: all-reduce" in causes(together)[0]


def test_two_launchers_on_a_node() -> None:
    nodes = [node("n1", launcher=7, pid=70), node("n1", launcher=8, pid=80)]
    ranks = [rank(0, pid=70), rank(0, pid=80)]
    found = causes(judge(nodes, ranks, wanted(nodes=["n1"], world_size=2)))
    assert "2 launchers on n1: process 7, process 8" in found[0]
    assert any("rank 0 is there 2 times: process 70 on n1 and process 80 on n1" in cause for cause in found)
    assert any("rank 0 (process 70) and rank 0 (process 80) share GPU a on n1" in cause for cause in found)


def test_a_world_of_the_wrong_size() -> None:
    report = judge([node("n1"), node("n2", 1)], [rank(0, world_size=1)], wanted())
    assert "the world size is 1, but 2 nodes x 1 ranks = 2" in causes(report)[0]
    mixed = judge([node("n1"), node("n2", 1)], [rank(0), rank(1, "n2", world_size=3)], wanted())
    assert any("was told a world size of" in cause for cause in causes(mixed))


def test_a_variable_that_does_not_reach_a_rank() -> None:
    listed = wanted(variables={"NCCL_SOCKET_IFNAME": "=bond0", "NCCL_DEBUG": "WARN"})
    good = {"NCCL_SOCKET_IFNAME": "=bond0", "NCCL_DEBUG": "WARN"}
    ranks = [rank(0, variables=good), rank(1, "n2", variables=good | {"NCCL_SOCKET_IFNAME": "eth0"})]
    report = judge([node("n1"), node("n2", 1)], ranks, listed)
    assert report.bad_nodes == ["n2"]
    assert "NCCL_SOCKET_IFNAME is 'eth0' on rank 1 (n2), and '=bond0' in the launch file" in causes(report)[0]

    unset = judge([node("n1"), node("n2", 1)], [rank(0, variables=good), rank(1, "n2", variables={})], listed)
    assert any(
        "NCCL_DEBUG is not set on rank 1 (n2), and 'WARN' in the launch file" in cause for cause in causes(unset)
    )

    nowhere = judge([node("n1"), node("n2", 1)], [rank(0), rank(1, "n2")], listed)
    assert nowhere.errors
    assert nowhere.bad_nodes == []


def test_a_variable_that_no_launch_file_lists_is_only_told() -> None:
    ranks = [rank(0, variables={"NCCL_ALGO": "Ring"}), rank(1, "n2", variables={"NCCL_ALGO": "Tree"})]
    report = judge([node("n1"), node("n2", 1)], ranks, wanted())
    assert [finding.level for finding in report.findings] == ["warning"]


def test_loopback_is_wrong_on_two_machines_only() -> None:
    local = Master(name="n1", port=1, addresses=["127.0.1.1"], loopback=True)
    apart = judge([node("n1"), node("n2", 1, master=local)], [rank(0), rank(1, "n2")], wanted())
    assert apart.bad_nodes == ["n2"]
    assert "the name of rank 0, n1, is a loopback address here: 127.0.1.1" in causes(apart)[0]
    own = judge([node("n1", master=local), node("n2", 1)], [rank(0), rank(1, "n2")], wanted())
    assert causes(own) == []  # its own name, as many hosts have it: rank 0 listens there too
    one = {"boot_id": "same", "master": local}
    assert causes(judge([node("n1", **one), node("n2", 1, **one)], [rank(0), rank(1, "n2")], wanted())) == []


def test_of_two_clocks_the_file_system_s_tells_which_is_wrong() -> None:
    ranks = [rank(0), rank(1, "n2")]
    neither = judge([node("n1"), node("n2", 1, skew=600.0)], ranks, wanted())
    assert neither.bad_nodes == []
    assert "the clocks of n1 and n2 are 600.0 s apart" in causes(neither)[0]
    told = judge([node("n1", file_skew=-600.0), node("n2", 1, skew=600.0, file_skew=0.0)], ranks, wanted())
    assert told.bad_nodes == ["n1"]


def test_the_floor_and_the_slow_node() -> None:
    timed = AllReduce(backend="nccl", bytes=1 << 28, seconds=0.01, bus_gbps=20.0)
    nodes = [node(f"n{number}", number, local_gbps=100.0 if number != 2 else 30.0) for number in (1, 2, 3)]
    ranks = [rank(number, f"n{number}", world_size=3) for number in (1, 2, 3)]
    loose = judge(nodes, ranks, wanted(nodes=[], world_size=3), timed)
    assert [finding.level for finding in loose.findings] == ["warning"]
    strict = judge(nodes, ranks, wanted(nodes=[], world_size=3, limits=PreflightConfig(min_bus_gbps=100)), timed)
    assert strict.bad_nodes == ["n2"]
    assert any("the all-reduce makes 20.00 GB/s, preflight.min_bus_gbps is 100" in cause for cause in causes(strict))


def test_the_table_has_a_line_for_each_node() -> None:
    report = judge([node("n1"), node("n2", 1, skew=600.0, file_skew=600.0)], [rank(0), rank(1, "n2")], wanted())
    lines = table(report).splitlines()
    assert lines[0].split()[:3] == ["node", "ranks", "GPUs"]
    assert lines[1].endswith("ok")
    assert lines[2].startswith("n2") and lines[2].endswith("bad")  # noqa: PT018
    assert lines[3].startswith("error: n2: ")


# what a node finds out
def test_infiniband_is_looked_for_in_sys(tmp_path: Path) -> None:
    for device, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / "sys/class/infiniband" / device / "ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
    (tmp_path / "dev/infiniband").mkdir(parents=True)
    record = node("n1")
    look_around(record, tmp_path, root=tmp_path)
    assert [(device.name, device.active) for device in record.ib_devices] == [("mlx5_0", True), ("mlx5_1", False)]
    assert not record.uverbs
    assert record.free_bytes
    assert record.cores == len(os.sched_getaffinity(0))


def test_a_rank_outside_the_image_is_seen_by_the_code_that_it_could_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "snapshot").mkdir()
    record = node("n1")
    look_around(record, tmp_path)
    assert record.contained is None
    monkeypatch.setenv("PIPELINE_IMAGE", "/shared/train.sqsh")
    look_around(record, tmp_path)
    assert record.contained is False


def test_a_name_that_does_not_resolve_is_told() -> None:
    master = connect("nope.invalid", 29500)
    assert "the name cannot be resolved" in master.error
    assert master.errno is not None


def test_a_port_that_nobody_listens_at_is_told_with_address_and_errno() -> None:
    master = connect("localhost", 1)
    assert master.loopback
    assert (master.error, master.errno) == ("Connection refused", 111)
