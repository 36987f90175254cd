"""What makes a node unfit: a table of rules for what a node tells of itself. merge.py compares the nodes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from pipeline.preflight.findings import Finding, IbDevice, NodeRecord, Wanted
from pipeline.preflight.nvidia_smi import Gpu
from pipeline.slurm.gres import gpus_in
from pipeline.units import size

MODEL = re.compile(r"[a-z]{1,3}[0-9]{1,4}(?![a-z0-9])")  # of a GPU: h100, a100_1g.5gb, l40, gh200; no other word
SMALL_STEP = "look at the srun options of the cluster file and the config: the step gets less than the Job has"
BUSY_MIB = 1024  # what an idle driver holds is below that
SHM_BYTES_PER_RANK = 128 << 20  # NCCL's guide gives a container of eight ranks 1 GB
MEMLOCK_ERROR, MEMLOCK_WARNING = 64 << 20, 4 << 30  # InfiniBand's buffers are locked in memory


class NodeRule(NamedTuple):
    """`check` returns what is wrong with a node, or None. `kind`: of blame.KINDS; without one no node is blamed."""

    level: Literal["error", "warning"]
    check: Callable[[NodeRecord, Wanted], str | None]
    remedy: str
    kind: str = ""


def node_findings(node: NodeRecord, wanted: Wanted) -> Iterator[Finding]:
    """Yield what the rules find on one node."""
    for rule in RULES:
        cause = rule.check(node, wanted)
        if cause is not None:
            yield Finding(rule.level, node.node, cause, rule.remedy, rule.kind)


def _error(node: NodeRecord, wanted: Wanted) -> str | None:
    return node.error or None


def _hang(node: NodeRecord, wanted: Wanted) -> str | None:
    if node.ready or node.error:
        return None
    return f"got no further within {wanted.limits.timeout:g} s than: {node.doing}"


def _contained(node: NodeRecord, wanted: Wanted) -> str | None:
    return "runs on the node itself, and not in the image" if node.contained is False else None


def _smi(node: NodeRecord, wanted: Wanted) -> str | None:
    if node.smi is None or node.smi.state == "ok" or (node.smi.state == "absent" and not wanted.gpus_per_node):
        return None
    return f"nvidia-smi: {node.smi.message or 'is not in the container'}"


def _registered(node: NodeRecord, wanted: Wanted) -> str | None:
    gres = wanted.gres.get(node.node)
    if gres is None or sum(gpus.number for gpus in gpus_in(gres)) >= wanted.gpus_per_node:
        return None
    return f"{wanted.gpus_per_node} GPUs are asked for, but Slurm has registered {gres}"


def _build(node: NodeRecord, wanted: Wanted) -> str | None:
    """Find a torch that can use no GPU wherever it runs: the interpreter's fault, and no node's."""
    if not wanted.gpus_per_node or node.cuda_build is not False:
        return None
    return f"torch {node.torch} is built without CUDA, and {wanted.gpus_per_node} GPUs are asked for"


def _devices(node: NodeRecord, wanted: Wanted) -> str | None:
    if not wanted.gpus_per_node or node.cuda is None or len(node.gpus) == wanted.gpus_per_node:
        return None
    if node.cuda_build is False:
        return None  # that says it all
    gres = f" (GRES registered: {wanted.gres[node.node]})" if node.node in wanted.gres else ""
    seen = f"torch sees {len(node.gpus)} GPUs" if node.cuda else "torch.cuda.is_available() is False"
    return f"{seen}, but {wanted.gpus_per_node} are asked for{gres}"


def _kind(node: NodeRecord, wanted: Wanted) -> str | None:
    """Compare the GPUs' names with the types that Slurm has registered, as far as those look like a model: h100."""
    kinds = [gpus.kind for gpus in gpus_in(wanted.gres.get(node.node, ""))]
    models = [MODEL.match(kind.lower()) for kind in kinds]
    if not node.gpus or not models or not all(models):
        return None
    names = {name: re.sub(r"[^a-z0-9]", "", name.lower()) for name in node.gpus}
    strange = [name for name, plain in names.items() if not any(model and model[0] in plain for model in models)]
    if not strange:
        return None
    return f"its GPUs are {', '.join(strange)}, and Slurm has registered {wanted.gres[node.node]}"


def _visible(node: NodeRecord) -> list[Gpu]:
    """Return the GPUs that the ranks may use: those of other jobs on the node are none of our business."""
    if node.smi is None:
        return []
    mine = {uuid.removeprefix("GPU-") for uuid in node.gpu_uuids}
    return [gpu for gpu in node.smi.gpus if not mine or gpu.uuid.removeprefix("GPU-") in mine]


def _each_gpu(node: NodeRecord, tell: Callable[[Gpu], str]) -> str | None:
    return "; ".join(f"GPU {gpu.index}: {text}" for gpu in _visible(node) if (text := tell(gpu))) or None


def _fault(node: NodeRecord, wanted: Wanted) -> str | None:
    return _each_gpu(node, lambda gpu: gpu.fault)


def _ecc(node: NodeRecord, wanted: Wanted) -> str | None:
    return _each_gpu(node, lambda gpu: f"{gpu.ecc_errors} uncorrected ECC errors" if gpu.ecc_errors else "")


def _hardware_slowdown(node: NodeRecord, wanted: Wanted) -> str | None:
    return _each_gpu(node, lambda gpu: ", ".join(name for name in gpu.slowdowns if "software" not in name))


def _software_slowdown(node: NodeRecord, wanted: Wanted) -> str | None:
    return _each_gpu(node, lambda gpu: ", ".join(name for name in gpu.slowdowns if "software" in name))


def _busy(node: NodeRecord, wanted: Wanted) -> str | None:
    def tell(gpu: Gpu) -> str:
        if gpu.used_mib is None or gpu.used_mib <= BUSY_MIB:
            return ""
        by = ", ".join(f"pid {holder.pid}" for holder in gpu.holders) or "a process that cannot be seen from here"
        return f"{gpu.used_mib:,} MiB are held by {by}"

    return _each_gpu(node, tell)


def wants_infiniband(node: NodeRecord) -> bool:
    """Tell whether the environment asks NCCL for InfiniBand: then a silent fallback to sockets would be the fault."""
    return node.variables.get("NCCL_IB_DISABLE") == "0" and bool(node.variables.get("NCCL_IB_HCA"))


def matching_devices(hca: str, devices: list[IbDevice]) -> list[IbDevice]:
    """Return the devices that NCCL_IB_HCA selects: prefixes, whole names after `=`, all others after `^`."""
    inverted, exact = hca.startswith("^"), hca.lstrip("^").startswith("=")
    names = [name.partition(":")[0].strip() for name in hca.lstrip("^=").split(",")]

    def named(device: str) -> bool:
        return any(device == name if exact else device.startswith(name) for name in names)

    return [device for device in devices if named(device.name) != inverted]


def _no_infiniband(node: NodeRecord, wanted: Wanted) -> str | None:
    if not wants_infiniband(node):
        return None
    hca, devices = node.variables["NCCL_IB_HCA"], node.ib_devices
    if not devices:
        return f"NCCL_IB_HCA={hca} asks for InfiniBand, but /sys/class/infiniband has no device"
    chosen = matching_devices(hca, devices)
    if not chosen:
        return f"NCCL_IB_HCA={hca} names none of the devices here: {', '.join(device.name for device in devices)}"
    if not any(device.active for device in chosen):
        return f"no port is active of the InfiniBand devices {', '.join(device.name for device in chosen)}"
    return None if node.uverbs else "there are InfiniBand devices, but no /dev/infiniband/uverbs* in the container"


def _memlock(node: NodeRecord, wanted: Wanted) -> str | None:
    too_small = wants_infiniband(node) and node.memlock is not None and node.memlock < MEMLOCK_ERROR
    return _memlock_text(node) if too_small else None


def _memlock_finite(node: NodeRecord, wanted: Wanted) -> str | None:
    finite = wants_infiniband(node) and node.memlock is not None and MEMLOCK_ERROR <= node.memlock < MEMLOCK_WARNING
    return _memlock_text(node) if finite else None


def _memlock_text(node: NodeRecord) -> str:
    return f"locked memory is limited to {size(node.memlock or 0)}"


def _shm(node: NodeRecord, wanted: Wanted) -> str | None:
    needed = SHM_BYTES_PER_RANK * wanted.nproc_per_node
    if not wanted.gpus_per_node or wanted.nproc_per_node < 2 or node.shm_free is None or node.shm_free >= needed:
        return None
    return f"/dev/shm has {size(node.shm_free)} free, {wanted.nproc_per_node} ranks with NCCL want {size(needed)}"


def _token(node: NodeRecord, wanted: Wanted) -> str | None:
    if node.sees_token is False:
        return "does not see the file that rank 0 wrote into the Run's folder"
    return None if node.is_seen else "rank 0 does not see the file that it wrote into the Run's folder"


def _space(node: NodeRecord, wanted: Wanted) -> str | None:
    if node.free_bytes is None or node.free_bytes >= wanted.free_bytes:
        return None
    return f"the Run's folder has {size(node.free_bytes)} free, {size(wanted.free_bytes)} are needed"


def _unresolved(node: NodeRecord, wanted: Wanted) -> str | None:
    return _no_way(node) if node.master is not None and not node.master.addresses else None


def _unreached(node: NodeRecord, wanted: Wanted) -> str | None:
    return _no_way(node) if node.master is not None and node.master.addresses else None


def _no_way(node: NodeRecord) -> str | None:
    master = node.master
    if master is None or not master.error:
        return None
    place = f"{master.name}:{master.port} ({', '.join(master.addresses) or 'no address'})"
    number = "" if master.errno is None else f" [errno {master.errno}]"
    return f"no TCP connection to rank 0 at {place} within {master.seconds:.0f} s: {master.error}{number}"


def _load(node: NodeRecord, wanted: Wanted) -> str | None:
    if node.load is None or not node.cores or node.load <= 1.5 * node.cores:
        return None
    return f"load average {node.load:.1f} on {node.cores} cores before anything runs"


def _memory(node: NodeRecord, wanted: Wanted) -> str | None:
    """A site may keep some of the memory back, so half of it is the mark."""
    has, limit = node.granted.memory, node.granted.limit
    if has is None or limit is None or limit * 2 > has:
        return None
    return f"its processes may use {size(limit)} of memory, and the Job has {size(has)} there"


DRAIN = "have the node drained and the GPU reset or replaced"
REACHABLE = "have the name resolve to an address of the nodes' network, and the port opened in firewalls"
RULES = [
    NodeRule("error", _error, "read the traceback in the log"),
    NodeRule("error", _hang, "have the node drained and looked at", "absent"),
    NodeRule("error", _contained, "have Pyxis loaded there: plugstack.conf, and spank_pyxis.so", "container"),
    NodeRule("error", _smi, "have the node's driver looked at, or the container's mount of it", "gpu missing"),
    NodeRule("error", _registered, "ask for fewer GPUs, or for another partition", "gpu missing"),
    NodeRule("error", _build, "name a python whose torch is built with CUDA, or an image that has one"),
    NodeRule("error", _devices, "ask for the GPUs that are there, or have the node looked at", "gpu missing"),
    NodeRule("warning", _kind, "have gres.conf looked at, or ask for another gpu_type"),
    NodeRule("error", _fault, DRAIN, "gpu fault"),
    NodeRule("error", _ecc, DRAIN, "gpu fault"),
    NodeRule("error", _hardware_slowdown, "have cooling and power of the node looked at", "gpu fault"),
    NodeRule("warning", _software_slowdown, "have the node's cooling looked at"),
    NodeRule("error", _busy, "end that process, or have the node drained", "gpu fault"),
    NodeRule(
        "error",
        _no_infiniband,
        "mount /dev/infiniband and its devices, or set NCCL_IB_DISABLE=1 to use sockets",
        "infiniband",
    ),
    NodeRule(
        "error",
        _memlock,
        "set LimitMEMLOCK=infinity for slurmd and PropagateResourceLimitsExcept=MEMLOCK",
        "limits",
    ),
    NodeRule("warning", _memory, SMALL_STEP),
    NodeRule("warning", _memlock_finite, "InfiniBand wants `ulimit -l unlimited` in the step"),
    NodeRule("error", _shm, "give the container a larger /dev/shm, or remove what lies there", "limits"),
    NodeRule("error", _token, "mount the Run's folder there, from the file system that all nodes share", "mount"),
    NodeRule("error", _space, "remove old Runs, lower pretrain.keep_last, or set preflight.min_free_bytes", "disk"),
    NodeRule("error", _unresolved, REACHABLE, "names"),
    NodeRule("error", _unreached, REACHABLE, "route"),
    NodeRule("warning", _load, "see what runs there"),
]
