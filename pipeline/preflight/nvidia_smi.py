"""What nvidia-smi says about this machine's GPUs; absent, broken and hanging ones included."""

from __future__ import annotations

import subprocess
from typing import Literal

from pydantic import BaseModel

SECONDS = 30.0  # a healthy one answers within two; without persistence mode it first wakes the driver
FIELDS = "index,uuid,name,driver_version,memory.used,memory.total,ecc.errors.uncorrected.volatile.total"
REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")  # the second before driver 535
# Bits of nvmlClocksEventReasons that mean a fault or heat. Power caps (0x4) and idling (0x1) are everyday.
SLOWDOWNS = {
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


class Holder(BaseModel):
    """A process that holds memory of a GPU."""

    pid: int
    mib: int | None


class Gpu(BaseModel):
    """One GPU; None is what nvidia-smi cannot or may not tell."""

    index: int
    uuid: str
    name: str
    used_mib: int | None = None
    total_mib: int | None = None
    ecc_errors: int | None = None  # uncorrected, since the driver was loaded
    slowdowns: list[str] = []
    holders: list[Holder] = []
    fault: str = ""  # such as "GPU is lost"


class Smi(BaseModel):
    """The answer as a whole."""

    state: Literal["ok", "absent", "hung", "failed"]
    message: str = ""
    driver: str = ""
    gpus: list[Gpu] = []


def ask_nvidia_smi(seconds: float = SECONDS) -> Smi:
    """Ask nvidia-smi about each GPU and the processes on it; never raises, never waits for longer than about that."""
    status, text = 0, ""
    try:
        for reasons in REASONS:
            status, text = _run([f"--query-gpu={FIELDS},{reasons}"], seconds)
            if status == 0 or "not a valid field" not in text:
                break
        if status != 0:
            return Smi(state="failed", message=f"exit {status}: {_first_line(text)}")
        smi = parse_gpus(text)
        status, text = _run(["--query-compute-apps=gpu_uuid,pid,used_memory"], seconds)
    except FileNotFoundError:
        return Smi(state="absent")
    except subprocess.TimeoutExpired:
        return Smi(state="hung", message=f"no answer within {seconds:g} s")
    except (OSError, ValueError) as error:
        return Smi(state="failed", message=str(error))
    if status == 0:  # else a container that may not see other processes: the memory in use is known all the same
        add_holders(smi, text)
    return smi


def parse_gpus(text: str) -> Smi:
    """Read the lines of `--query-gpu` (FIELDS and the slowdown reasons); ValueError where they are not such lines."""
    gpus, driver = [], ""
    for line in text.strip().splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) != FIELDS.count(",") + 2:
            raise ValueError(f"nvidia-smi answered a line that is not understood: {line[:200]}")
        driver = values[3]
        fault = next((value.strip("[]") for value in values if "lost" in value or value == "[Unknown Error]"), "")
        gpus.append(
            Gpu(
                index=int(values[0]),
                uuid=values[1],
                name=values[2],
                used_mib=_whole(values[4]),
                total_mib=_whole(values[5]),
                ecc_errors=_whole(values[6]),
                slowdowns=_slowdowns(values[7]),
                fault=fault,
            )
        )
    return Smi(state="ok", driver=driver, gpus=gpus)


def add_holders(smi: Smi, text: str) -> None:
    """Add the processes of `--query-compute-apps=gpu_uuid,pid,used_memory` to their GPUs."""
    gpus = {gpu.uuid: gpu for gpu in smi.gpus}
    for line in text.strip().splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) == 3 and values[0] in gpus and values[1].isdigit():
            gpus[values[0]].holders.append(Holder(pid=int(values[1]), mib=_whole(values[2])))


def _run(words: list[str], seconds: float) -> tuple[int, str]:
    """Return exit status and output. After a kill it is not waited for: in the kernel, a process may never end."""
    process = subprocess.Popen(
        ["nvidia-smi", *words, "--format=csv,noheader,nounits"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        start_new_session=True,
    )  # fmt: skip
    try:
        text, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, text


def _whole(text: str) -> int | None:
    return int(text) if text.isdigit() else None  # "[N/A]", "[Insufficient Permissions]"


def _slowdowns(text: str) -> list[str]:
    try:
        bits = int(text, 16)
    except ValueError:
        return []
    return [name for bit, name in SLOWDOWNS.items() if bits & bit]


def _first_line(text: str) -> str:
    return next((line.strip()[:200] for line in text.splitlines() if line.strip()), "no output")
