"""What this process computes on: device, threads, number format, compiler, and its fellow ranks."""

from __future__ import annotations

import os
import shutil
import sysconfig
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipeline.config.schema import Config
from pipeline.errors import NotReadyError
from pipeline.files import read_object
from pipeline.plan import sizes

PAYS = 5e12  # FLOPs of a Run, half a minute of two cores, from which a CPU gains more by compiling than it costs


@dataclass(frozen=True)
class Hardware:
    """The choices that the Config left open, made once for a Run and kept when it is resumed."""

    device: str
    precision: str  # fp32 or bf16
    compile: bool
    threads: int
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1  # ranks on this machine

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context that forward passes run in: weights stay fp32, matrix products are bf16."""
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.partition(":")[0], dtype=torch.bfloat16)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def choose_hardware(config: Config, recorded: dict[str, Any] | None = None) -> Hardware:
    """Look at the machine and settle what the Config leaves to it; a former choice of this Run (`recorded`) wins."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank, local_size = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu"
    if device != "cpu" and local_size > torch.cuda.device_count():
        raise NotReadyError(f"{local_size} ranks on this machine, but it has {torch.cuda.device_count()} GPUs")
    former = recorded or {}
    threads = config.threads or max(1, len(os.sched_getaffinity(0)) // local_size)
    if former.get("world_size") == world_size and former.get("device") == device:
        threads = config.threads or former.get("threads", threads)
    return Hardware(
        device=device,
        precision=former.get("precision") or _precision(config.pretrain.precision, device),
        compile=_compile(config, device, former.get("compile")),
        threads=threads,
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_size,
    )


def start_hardware(config: Config, record: Path) -> Hardware:
    """Choose the hardware as the Run whose run.json is `record` did, and make this process ready for it."""
    hardware = choose_hardware(config, read_object(record).get("hardware"))
    start_ranks(hardware)
    return hardware


def _precision(wanted: str, device: str) -> str:
    fast = has_fast_bf16(device)
    if wanted == "auto":
        return "bf16" if fast else "fp32"
    if wanted == "bf16" and device != "cpu" and not fast:
        name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        raise NotReadyError(
            f"pretrain.precision: bf16 is emulated on {name} (compute capability {capability[0]}.{capability[1]}, "
            "8.0 is needed) and very slow; write fp32 or auto"
        )
    return wanted


def has_fast_bf16(device: str) -> bool:
    """Tell whether bf16 products run in hardware: compute capability 8.0, or AVX512-BF16 or AMX on a CPU."""
    if device != "cpu":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def _compile(config: Config, device: str, former: bool | None) -> bool:
    """Decide whether to compile; what the Run did before wins over `auto`, so that its losses stay the same."""
    wanted = config.pretrain.compile
    if wanted == "auto" and former is not None:
        wanted = former
    if wanted is False:
        return False
    missing = missing_for_compiler()
    if wanted is True and missing:
        raise NotReadyError(
            f"pretrain.compile: true needs {missing}, or write compile: auto or false"
            if config.pretrain.compile is True
            else f"this Run was compiled until now, which needs {missing}, or go on with pretrain.compile=false"
        )
    return missing is None and (wanted is True or device != "cpu" or sizes.total_flops(config) >= PAYS)


def missing_for_compiler() -> str | None:
    """Say what torch.compile would miss here and how to get it; None if nothing."""
    if not any(c and shutil.which(c) for c in (os.environ.get("CXX"), "g++", "clang++", "c++")):
        return "a C++ compiler and none is on PATH (g++ or clang++, or CXX); install one"
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        return f"Python's headers, and {headers} has no Python.h; install python3-dev, or use another Python"
    return None


def start_ranks(hardware: Hardware) -> None:
    """Set threads and device, and join the other ranks where there are any."""
    torch.set_num_threads(hardware.threads)
    if hardware.device != "cpu":
        torch.cuda.set_device(hardware.device)
    if hardware.world_size > 1:
        dist.init_process_group("gloo" if hardware.device == "cpu" else "cpu:gloo,cuda:nccl")


def end_ranks() -> None:
    """Leave the other ranks; without it gloo aborts at exit now and then."""
    if dist.is_initialized():
        dist.destroy_process_group()
