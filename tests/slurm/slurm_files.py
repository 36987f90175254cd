"""The files of a private Slurm: slurm.conf and what belongs to it, as text."""

from __future__ import annotations

import random
import socket
from collections.abc import Mapping
from pathlib import Path

CONTROLLER = "ctl"
GPU_TYPE = "h100"

SETTINGS = {
    "SlurmUser": "root",
    "AuthType": "auth/munge",
    "MpiDefault": "none",
    # No cgroups: a container seldom has them to give.
    "ProctrackType": "proctrack/linuxproc",
    "TaskPlugin": "task/none",
    "JobAcctGatherType": "jobacct_gather/none",
    "MailProg": "/bin/true",
    "SelectType": "select/cons_tres",
    "SelectTypeParameters": "CR_CPU_Memory",
    "DefMemPerCPU": "200",  # without it each job takes all memory of its node, and so the node
    "GresTypes": "gpu",
    "SlurmdParameters": "config_overrides",  # nodes may claim more CPUs than there are
    "ReturnToService": "2",
    "PropagateResourceLimits": "NONE",
    "SchedulerType": "sched/backfill",
    "SchedulerParameters": "bf_interval=2,bf_resolution=60,bf_continue,sched_interval=2,batch_sched_delay=0,sched_min_interval=0",
    "PreemptType": "preempt/partition_prio",
    "PreemptMode": "REQUEUE",
    "JobRequeue": "1",
    "MaxArraySize": "20",  # so indices 0 to 19
    "MaxJobCount": "500",
    "MinJobAge": "1800",  # tests look at finished jobs
    "KillWait": "5",
    "SlurmdTimeout": "10",
    "SlurmctldTimeout": "10",
    "TCPTimeout": "2",
    "MessageTimeout": "10",
    "UnkillableStepTimeout": "90",  # a step whose end found no controller says so again after 60 s
    "JobCompType": "jobcomp/filetxt",
}


def free_ports(number: int) -> list[int]:
    """Choose TCP ports that nothing listens on, below those that the kernel and the product take by themselves."""
    found: list[int] = []
    for port in random.sample(range(11000, 20000), 200):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == number:
            break
    return found


def address(number: int) -> str:
    """Return the loopback address of a node (1, 2, …), of the controller (0)."""
    return f"127.0.0.{10 + number}"


def hosts_file(nodes: list[str]) -> str:
    """Write the hosts' /etc/hosts: a rank finds the others, and itself, by the node's name."""
    lines = ["127.0.0.1 localhost", f"{address(0)} {CONTROLLER}"]
    lines += [f"{address(number)} {node}" for number, node in enumerate(nodes, 1)]
    return "\n".join(lines) + "\n"


def slurm_conf(
    root: Path, cluster: str, nodes: list[str], *, cpus: int, memory: int, gpus: int, accounting: bool,
    settings: Mapping[str, str],
) -> str:  # fmt: skip
    """Write slurm.conf; `settings` go over everything else, in Slurm's own spelling."""
    control, *ports = free_ports(len(nodes) + 1)
    values = {
        "ClusterName": cluster,
        "SlurmctldHost": f"{CONTROLLER}({address(0)})",
        "SlurmctldPort": str(control),
        # Bound to the loopback address alone. Not NoInAddrAny too, which would bind the nodes' daemons so, but srun as well,
        # and a step answers the address that srun's call came from: 127.0.0.1, whatever the node's is.
        "CommunicationParameters": "NoCtldInAddrAny",
        # Slurm keeps a requeued job until every credential of its last start has expired: by default two minutes.
        "AuthInfo": f"socket={root}/munge/socket,cred_expire=5",
        "StateSaveLocation": f"{root}/state",
        "SlurmdSpoolDir": f"{root}/spool/%n",
        "SlurmctldPidFile": f"{root}/slurmctld.pid",
        "SlurmdPidFile": f"{root}/slurmd.%n.pid",
        "SlurmctldLogFile": f"{root}/log/slurmctld.log",
        "SlurmdLogFile": f"{root}/log/slurmd.%n.log",
        "JobCompLoc": f"{root}/jobcomp.log",
        "PlugStackConfig": f"{root}/plugstack.conf",
        **SETTINGS,
        **(ACCOUNTING if accounting else {}),
        **(
            {"AccountingStoragePass": f"{root}/munge/socket"} if accounting else {}
        ),  # for slurmdbd AuthInfo does not count
        **settings,
    }
    lines = [f"{key}={value}" for key, value in values.items()]
    gres = f" Gres=gpu:{GPU_TYPE}:{gpus}" if gpus else ""
    lines += [
        f"NodeName={node} NodeAddr={address(number)} NodeHostname={node} Port={port} CPUs={cpus} RealMemory={memory}{gres}"
        for number, (node, port) in enumerate(zip(nodes, ports, strict=True), 1)
    ]
    lines += [
        "PartitionName=main Nodes=ALL Default=YES MaxTime=1-00:00:00 DefaultTime=10 PriorityTier=1 GraceTime=0",
        "PartitionName=high Nodes=ALL MaxTime=1-00:00:00 DefaultTime=10 PriorityTier=10 PreemptMode=OFF",
        "PartitionName=short Nodes=ALL MaxTime=2 DefaultTime=1 PriorityTier=1",
    ]
    return "\n".join(lines) + "\n"


def gres_conf(nodes: list[str], devices: list[Path]) -> str:
    """Write gres.conf: character devices stand in for GPUs; Slurm takes no plain file for one."""
    return "".join(f"NodeName={node} Name=gpu Type={GPU_TYPE} File={device}\n" for node in nodes for device in devices)


ACCOUNTING = {
    "AccountingStorageType": "accounting_storage/slurmdbd",
    "AccountingStorageHost": address(0),
    "AccountingStorageTRES": "gres/gpu",
    "JobAcctGatherType": "jobacct_gather/linux",
    "PriorityType": "priority/multifactor",
}


def cgroup_conf(version: tuple[int, ...]) -> str:
    """Write cgroup.conf so that slurmd leaves cgroups, and systemd, alone: some versions look for both even unasked."""
    # Before 24.05 there is no "disabled", and v1's plugin does nothing until another plugin asks it to.
    return f"CgroupPlugin={'disabled' if version >= (24, 5) else 'cgroup/v1'}\n"


def slurmdbd_conf(root: Path, port: int) -> str:
    """Write slurmdbd.conf; where the database's socket is says MYSQL_UNIX_PORT in slurmdbd's environment."""
    values = {
        "DbdHost": CONTROLLER,
        "DbdAddr": address(0),
        "DbdPort": str(port),
        "SlurmUser": "root",
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={root}/munge/socket",
        "StorageType": "accounting_storage/mysql",
        "StorageHost": "localhost",
        "StorageUser": "root",
        "StorageLoc": "slurm",
        "LogFile": f"{root}/log/slurmdbd.log",
        "PidFile": f"{root}/slurmdbd.pid",
        "CommunicationParameters": "NoInAddrAny",
    }
    return "".join(f"{key}={value}\n" for key, value in values.items())
