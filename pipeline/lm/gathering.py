"""Where the ranks meet before there is a process group: a key-value store at MASTER_ADDR:MASTER_PORT."""

from __future__ import annotations

import errno
import os
import time
from datetime import timedelta

import torch
from torch.distributed import DistNetworkError, Store, TCPStore

from pipeline.errors import NotReadyError

POLL_SECONDS = 0.1


class Gathering:
    """The store: texts by name, and lists of texts that any rank adds to."""

    def __init__(self, host: str, port: int, seconds: float, *, listen: bool) -> None:
        """Open it, with `seconds` for each call. Rank 0 listens for the others, unless its torchrun already does."""
        listen = listen and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._read: dict[str, list[str]] = {}
        try:
            self.store: Store = TCPStore(
                "localhost" if listen else host, port, is_master=listen, wait_for_workers=False,
                timeout=timedelta(seconds=seconds),
            )  # fmt: skip
        except DistNetworkError as error:
            if listen and "EADDRINUSE" in str(error):
                text = os.strerror(errno.EADDRINUSE)
                raise NotReadyError(f"port {port}: {text}; see which process listens there: ss -ltnp") from error
            raise

    def tell(self, name: str, text: str) -> None:
        """Set a text that others wait for."""
        self.store.set(name, text)

    def hear(self, name: str) -> str:
        """Wait for a text and return it."""
        return str(self.store.get(name).decode())

    def append(self, kind: str, text: str = "") -> None:
        """Add a text to a list."""
        place = self.store.add(f"{kind}/count", 1)
        self.store.set(f"{kind}/{place}", text)

    def read(self, kind: str) -> list[str]:
        """Return a list as it is now; of one that is read again and again only what is new is fetched."""
        known = self._read.setdefault(kind, [])
        count = self.store.add(f"{kind}/count", 0)
        while len(known) < count and self.store.check([f"{kind}/{len(known) + 1}"]):
            known.append(self.hear(f"{kind}/{len(known) + 1}"))
        return known

    def wait_for(self, kind: str, count: int, seconds: float) -> list[str]:
        """Wait until a list has `count` entries, or `seconds` are over; return it."""
        deadline = time.monotonic() + seconds
        while len(self.read(kind)) < count and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return self.read(kind)


def look_at_build() -> tuple[str, bool]:
    """Return torch's version, and whether it is built for GPUs: CUDA, or AMD's HIP."""
    return torch.__version__, bool(torch.version.cuda or getattr(torch.version, "hip", None))


def look_at_gpus() -> tuple[bool, list[str], list[str]]:
    """Return whether CUDA works, and names and UUIDs of the GPUs that this process sees. Nothing is allocated."""
    if not torch.cuda.is_available():
        return False, [], []
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return True, [gpu.name for gpu in properties], [str(getattr(gpu, "uuid", "")) for gpu in properties]
