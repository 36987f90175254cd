"""Write a cluster file from what a Slurm says about itself, for a person to look through."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path, PurePosixPath

from pipeline.cluster.parts import Login
from pipeline.config.yaml12_dump import dump_scalar
from pipeline.errors import NotReadyError, UserError
from pipeline.hints import command
from pipeline.slurm.commands import Partition, Slurm
from pipeline.slurm.errors import SlurmError
from pipeline.slurm.gres import Gpus, gpus_in

DEFAULT_FILE = Path("cluster.yaml")


def init_cluster(path: Path, slurm: Slurm, login: Login | None = None) -> None:
    """Write the file at `path`; UserError where there is one already, SlurmError where no Slurm answers.

    `login` is how `slurm` is reached where that is not from this machine.
    """
    if path.exists():  # before Slurm is asked for nothing
        raise _taken(path)
    text = template(slurm, path, login)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise _taken(path) from None
    except OSError as error:
        raise NotReadyError(f"{path}: cannot be written: {error.strerror}; choose another folder") from None


def _taken(path: Path) -> UserError:
    return UserError(f"{path} is there already, and is not written over; name another file: init --cluster FILE")


def template(slurm: Slurm, path: Path, login: Login | None = None) -> str:
    """Compose the text of the cluster file that is to lie at `path`."""
    if not login and (asked := os.environ.get("SLURM_CLUSTERS")):  # of which Slurm's commands see nothing otherwise
        slurm = replace(slurm, cluster=asked.partition(",")[0])
    partitions, config = slurm.partitions(), slurm.config()
    if not partitions:
        raise NotReadyError("sinfo shows no partition that you may use; ask an administrator")
    chosen = choose(partitions)
    name, version = config.get("ClusterName", "?"), config.get("SLURM_VERSION", "?")
    lines = [
        f"# Written from what the Slurm {version} named {name} says about itself. Look through it: what sites ask for",
        f'# differs. Every key: docs/config.md, "Cluster file". To check it: {command("doctor", "--cluster", path)}',
        "scheduler: slurm",
        *([f"cluster: {dump_scalar(slurm.cluster)} # one of several: from SLURM_CLUSTERS"] if slurm.cluster else []),
        "",
        *(_login_lines(login) if login else _interpreter_lines()),
        "",
        *_partition_lines(partitions, chosen),
        *_account_lines(slurm),
        "  # qos: normal",
        "  # exclusive: true",
        "",
        *_resource_lines(partitions, chosen),
        "",
        "# network: infiniband # or tcp, roce, efa: variables of NCCL; without it NCCL chooses by itself",
        "# env: {NCCL_SOCKET_IFNAME: =eth0} # = the whole name, else its beginning",
        "",
        f"# A Job is warned so many seconds before its time limit; on preemption it has KillWait, here "
        f"{config.get('KillWait', 'unknown')}.",
        "signal_lead: 120",
        "nodes_may_submit: true # false where sbatch and scontrol fail on compute nodes",
        "# confirm_gpu_hours: 1000",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _interpreter_lines() -> list[str]:
    return [
        "# Interpreters, by absolute paths that every node sees.",
        f"python: {dump_scalar(sys.executable)}",
        f"host_python: {dump_scalar(sys.executable)}",
    ]


def _login_lines(login: Login) -> list[str]:
    environment = str(PurePosixPath(login.root).parent / "env")
    python = dump_scalar(f"{environment}/bin/python")
    return [
        "# How to get there from here. root is the folder for Runs over there: every node must see it.",
        "login:",
        f"  prefix: [{', '.join(map(dump_scalar, login.prefix))}]",
        f"  quoting: {login.quoting}",
        f"  root: {dump_scalar(login.root)}",
        "",
        "# Interpreters over there, by absolute paths that every node sees. To make one for both, over there:",
        f"#   python3 -m venv {environment}",
        f"#   {environment}/bin/pip install '.[train,report]'    # in a checkout of this project",
        f"python: {python}",
        f"host_python: {python}",
    ]


def choose(partitions: list[Partition]) -> Partition:
    """Return the default partition, unless others have GPUs and it has none."""
    up = [partition for partition in partitions if partition.is_up] or partitions
    with_gpus = [partition for partition in up if gpus_in(partition.gres)]
    return min(with_gpus or up, key=lambda partition: not partition.is_default)


def _partition_lines(partitions: list[Partition], chosen: Partition) -> list[str]:
    rows = [("partition", "time limit", "nodes", "CPUs", "MB", "GRES")]
    rows += [
        (p.name + ("*" if p.is_default else ""), p.time_limit, str(p.nodes), str(p.cpus), str(p.memory), p.gres or "-")
        for p in partitions
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [*(f"# {line}" for line in table), "sbatch:", f"  partition: {dump_scalar(chosen.name)}"]


def _account_lines(slurm: Slurm) -> list[str]:
    try:
        accounts = slurm.accounts()
    except SlurmError:  # no accounting
        accounts = []
    if not accounts:
        return ["  # account: my-group"]
    others = f" # or {', '.join(accounts[1:])}" if accounts[1:] else ""
    return [f"  account: {dump_scalar(accounts[0])}{others}"]


def _resource_lines(partitions: list[Partition], chosen: Partition) -> list[str]:
    kinds = [gpus_in(partition.gres) for partition in partitions if partition.name == chosen.name]
    gpus: list[Gpus] = max(kinds, key=lambda kind: sum(gpu.number for gpu in kind), default=[])
    cores = f"cores: {chosen.cpus} # of one node"
    if not gpus:
        return ["# No GPUs in this partition. Where there are some: gpus_per_node: 8", cores]
    best = max(gpus, key=lambda gpu: gpu.number)
    others = ", ".join(f"{gpu.number} {gpu.kind}" for gpu in gpus if gpu != best)
    return [
        f"gpus_per_node: {best.number}" + (f" # also {others}" if others else ""),
        f"gpu_type: {dump_scalar(best.kind)}" if best.kind else "# gpu_type: h100 # Slurm knows no types here",
        "gpu_flag: gres # or gpus-per-node, or none where nodes are given whole",
        cores,
        f"cpus_per_task: {max(1, chosen.cpus)} # all of a node's, for its one torchrun",
        "# mem: 0 # all of a node's memory; without it Slurm's default, which is little on some sites",
    ]
