"""The environment variables by which NCCL, UCX and Gloo find their way, in named profiles."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator

from pipeline.config.types import AsTyped, broken_rule

# NCCL's filters match the beginnings of names unless they start with `=`: `mlx5_1` means mlx5_10 too, `lo` lom1.
_NOT_LOOPBACK = {"NCCL_SOCKET_IFNAME": "^=lo,docker0"}
# NCCL_NET: without it NCCL falls back to sockets where it sees no adapter, many times slower and without an error.
_VERBS = {"NCCL_NET": "IB", "NCCL_IB_DISABLE": "0", "NCCL_IB_HCA": "mlx5", "UCX_NET_DEVICES": "all"}
PROFILES: dict[str, dict[str, str]] = {
    "tcp": _NOT_LOOPBACK | {"NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1"},
    "infiniband": _NOT_LOOPBACK | _VERBS,
    "roce": _NOT_LOOPBACK | _VERBS | {"NCCL_IB_GID_INDEX": "3"},  # RoCE v2 over IPv4 on most adapters
    "efa": _NOT_LOOPBACK | {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "FI_EFA_FORK_SAFE": "1"},
}
Network = Literal["tcp", "infiniband", "roce", "efa"]
NcclDebug = Literal["VERSION", "WARN", "INFO", "TRACE"]

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
ONE_INTERFACE = re.compile(r"=?([A-Za-z0-9][A-Za-z0-9._-]*)")
SECRET = re.compile(
    r"(^|_)(TOKEN|SECRETS?|PASSWORD|PASSWD|PASS|CREDENTIALS?|APIKEY|(API|ACCESS|PRIVATE|SECRET)_KEY)(_|$)"
)
LOADER = frozenset({"LD_PRELOAD", "LD_AUDIT"})
OWNED = re.compile(
    r"(SLURM|SBATCH|SRUN|SALLOC|PMI|PMIX)_.*"
    r"|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|NODE_RANK|MASTER_ADDR|MASTER_PORT|TORCHELASTIC_.*|PYTHONPATH"
)


def _name_rule(value: object) -> object:
    if not isinstance(value, str):
        return value
    if not VARIABLE.fullmatch(value):
        raise broken_rule("is not the name of a variable; write letters, digits and _, the first no digit")
    if value in LOADER:
        raise broken_rule("would put foreign code into every process, the shell and srun too; build it into the image")
    if SECRET.search(value.upper()):
        raise broken_rule(
            "looks like a secret, and what stands here lies readable in the Run; "
            "remove it, and export it in the shell that submits"
        )
    if OWNED.fullmatch(value):
        raise broken_rule("is set by Slurm, the launcher or the plan for each process; remove the line")
    return value


def _value_rule(value: object) -> object:
    if value is None:
        raise broken_rule('has no value; write one, or "" for an empty one')
    if isinstance(value, str) and "\0" in value:
        raise broken_rule("holds a NUL character, which no variable can hold; remove it")
    return value


Environment = Annotated[
    dict[Annotated[str, BeforeValidator(_name_rule)], Annotated[str, BeforeValidator(_value_rule)]], AsTyped()
]


def environment(network: str | None, nccl_debug: str, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that every rank must have: the profile's, then the user's over them."""
    found = PROFILES[network] if network else {}
    found = found | {"NCCL_DEBUG": nccl_debug}
    if nccl_debug in ("INFO", "TRACE"):
        found["NCCL_DEBUG_SUBSYS"] = "INIT,NET"  # which transport was taken; all of it is a flood
    found |= env
    # Gloo takes one exact name and by itself the interface that the host's name resolves to, often the slow one.
    interface = ONE_INTERFACE.fullmatch(found.get("NCCL_SOCKET_IFNAME", ""))
    if interface:
        found.setdefault("GLOO_SOCKET_IFNAME", interface[1])
    return found
