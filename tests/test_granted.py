"""Preflight compares what a step may use of a node with what the Job has there."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.preflight import PreflightConfig
from pipeline.preflight.findings import NodeRecord, RankRecord, Wanted
from pipeline.preflight.granted import MIB, Granted, affinity, granted, job_cpus, memory_limit
from pipeline.preflight.merge import judge

WANTED = Wanted(limits=PreflightConfig(), nproc_per_node=1, free_bytes=0, world_size=2, nodes=["n1", "n2"])


def causes(*given: Granted, cpus: str = "ff") -> list[str]:
    names = [f"n{number}" for number in range(1, len(given) + 1)]
    nodes = [NodeRecord(node=name, rank=at, pid=1, ready=True, sees_token=True, granted=given[at]) for at, name in enumerate(names)]  # fmt: skip
    ranks = [
        RankRecord(rank=at, local_rank=0, world_size=2, local_world_size=1, node=name, pid=1, device=name, cpus=cpus)
        for at, name in enumerate(names)
    ]
    return [str(finding) for finding in judge(nodes, ranks, WANTED).findings]


@pytest.mark.parametrize(
    ("text", "number", "found"),
    [
        ("8", 0, 8),
        ("8(x2),4", 1, 8),
        ("8(x2),4", 2, 4),
        ("8", 1, None),
        ("", 0, None),
        ("8", None, None),
        ("x", 0, None),
    ],
)
def test_the_cpus_of_a_job_on_each_of_its_nodes(text: str, number: int | None, found: int | None) -> None:
    assert job_cpus(text, number) == found


@pytest.mark.parametrize(
    ("variables", "mib"),
    [
        ({"SLURM_MEM_PER_NODE": "64000"}, 64000),
        ({"SLURM_MEM_PER_CPU": "200"}, 1600),
        ({"SLURM_MEM_PER_NODE": "0"}, None),  # whatever there is
        ({}, None),
    ],
)
def test_the_memory_of_a_job_on_a_node(tmp_path: Path, variables: dict[str, str], mib: int | None) -> None:
    found = granted({"SLURM_JOB_CPUS_PER_NODE": "8(x2)"} | variables, 1, tmp_path)
    assert (found.cpus, found.memory) == (8, mib * MIB if mib else None)
    assert granted({"SLURM_JOB_CPUS_PER_NODE": "8"}, 0, tmp_path, present=2).cpus == 2  # Slurm was told of more


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_memory_limit_is_the_least_of_all_cgroups_around(tmp_path: Path) -> None:
    assert memory_limit(tmp_path) is None
    write(tmp_path / "proc/self/cgroup", "0::/slurm/job_7/step_0\n")
    two = tmp_path / "sys/fs/cgroup/slurm/job_7"
    write(two / "memory.max", "2000\n")
    write(two / "step_0/memory.max", "max\n")
    assert memory_limit(tmp_path) == 2000
    write(tmp_path / "proc/self/cgroup", "4:cpu,memory:/slurm/uid_0/job_7\n3:cpuset:/x\n")
    one = tmp_path / "sys/fs/cgroup/memory/slurm/uid_0"
    write(one / "memory.limit_in_bytes", "9223372036854771712\n")
    write(one / "job_7/memory.limit_in_bytes", "3000\n")
    assert memory_limit(tmp_path) == 3000


def test_a_step_that_gets_one_cpu_of_a_whole_node_is_told_of(tmp_path: Path) -> None:
    small = Granted(cpus=64, memory=64 << 30, limit=8 << 30)
    memory, cpus = causes(small, small, cpus="1")
    assert cpus.startswith("all 2 nodes: its ranks may run on 1 CPUs, and the Job has 64 there")
    assert "its processes may use 8.59\xa0GB of memory, and the Job has 68.7\xa0GB there" in memory
    assert causes(small, Granted(), cpus="1")[1].startswith("n1: ")


def test_threads_counted_as_cores_and_a_little_memory_kept_back_are_no_news() -> None:
    fine = Granted(cpus=16, memory=64 << 30, limit=60 << 30)
    assert causes(fine, fine, cpus="ff") == []
    assert causes(Granted(), Granted(), cpus="") == []


def test_the_mask_of_this_process() -> None:
    assert int(affinity(), 16) > 0
