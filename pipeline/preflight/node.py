"""What a node can tell of itself without torch: limits, space, load, devices. Runs in the container, on each node."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import socket
import time
from ipaddress import ip_address
from pathlib import Path

from pipeline.preflight.findings import VARIABLES, IbDevice, Master, NodeRecord
from pipeline.preflight.granted import granted
from pipeline.preflight.nvidia_smi import ask_nvidia_smi

ROOT = Path("/")
CONNECT_SECONDS = 5.0  # for one attempt


def node_name() -> str:
    """Return the name that the scheduler knows this node by; its own, where no scheduler has named any."""
    if os.environ.get("PIPELINE_NODES"):
        return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    return socket.gethostname()


def expected_nodes() -> list[str]:
    """Return the nodes that the batch shell says are ours; none locally."""
    return [name for name in os.environ.get("PIPELINE_NODES", "").split(",") if name]


def expected_variables() -> dict[str, str]:
    """Return the variables that the launch file exports for the cluster: in one, as JSON."""
    found: dict[str, str] = json.loads(os.environ.get("PIPELINE_EXPECTED_ENV", "{}"))
    return found


def own_variables() -> dict[str, str]:
    """Return this process's variables of the network libraries, and those that are expected here."""
    expected = expected_variables()
    return {name: value for name, value in os.environ.items() if name.startswith(VARIABLES) or name in expected}


def look_around(record: NodeRecord, folder: Path, root: Path = ROOT) -> None:
    """Fill in what the kernel tells; `folder` is the Run's. What this machine does not tell stays None."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    record.memlock = None if soft == resource.RLIM_INFINITY else soft
    record.load, record.cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    nodes = expected_nodes()
    number = nodes.index(record.node) if record.node in nodes else None
    record.granted = granted(os.environ, number, root, os.cpu_count())
    record.boot_id = _text(root / "proc/sys/kernel/random/boot_id")
    record.shm_free = _free(root / "dev/shm")
    record.free_bytes = _free(folder)
    # Only a container has the Run's code mounted read-only.
    if os.environ.get("PIPELINE_IMAGE"):
        record.contained = bool(os.statvfs(folder / "snapshot").f_flag & os.ST_RDONLY)
    record.ib_devices = infiniband(root / "sys/class/infiniband")
    record.uverbs = any((root / "dev/infiniband").glob("uverbs*"))
    record.variables = own_variables()


def ask_driver(record: NodeRecord) -> None:
    """Ask nvidia-smi."""
    record.smi = ask_nvidia_smi()


def infiniband(folder: Path) -> list[IbDevice]:
    """List the InfiniBand devices of /sys/class/infiniband."""
    if not folder.is_dir():
        return []
    return [
        IbDevice(name=device.name, active=any("ACTIVE" in _text(state) for state in device.glob("ports/*/state")))
        for device in sorted(folder.iterdir())
    ]


def resolve(name: str, port: int) -> Master:
    """Look rank 0's name up; a name without an address is an error of the result."""
    master = Master(name=name, port=port)
    try:
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except OSError as error:
        master.errno, master.error = error.errno, f"the name cannot be resolved: {error.strerror}"
        return master
    master.addresses = list(dict.fromkeys(str(address[4][0]) for address in found))
    master.loopback = any(ip_address(address.partition("%")[0]).is_loopback for address in master.addresses)
    return master


def connect(name: str, port: int) -> Master:
    """Try once to connect to rank 0."""
    master = resolve(name, port)
    if not master.error:
        try:
            socket.create_connection((name, port), timeout=CONNECT_SECONDS).close()
        except OSError as error:
            master.errno = error.errno or (errno.ETIMEDOUT if isinstance(error, TimeoutError) else None)
            master.error = error.strerror or str(error)
    return master


def file_skew(path: Path) -> float | None:
    """Return by how many seconds this machine's clock is ahead of the one that dates the files in the Run's folder."""
    try:
        path.touch()
        before = time.time()
        return before - path.stat().st_mtime
    except OSError:
        return None


def _free(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
