"""A port that is open as long as its process lives: how ranks see whether one on another host, with no pid here, does.

Linux closes it with the process, however that ends. Nobody knocks until a connection has broken.
"""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress

KNOCK_SECONDS = 1.0  # a host that does not answer in this time is gone, or as good as
Address = tuple[str, int]


def open_door() -> Address | None:
    """Listen from now on; return where, or None where this process has no other hosts to talk to."""
    master = os.environ.get("MASTER_ADDR")
    if master is None:
        return None
    try:
        listener = socket.create_server((_own_address(master), 0), backlog=1024)
    except OSError:
        return None
    threading.Thread(target=_answer, args=(listener,), name="door", daemon=True).start()
    host, port = listener.getsockname()[:2]
    return str(host), int(port)


def answers(address: Address | None) -> bool:
    """Tell whether somebody listens there; taken for granted where nobody could tell us an address."""
    if address is None:
        return True
    try:
        socket.create_connection(address, timeout=KNOCK_SECONDS).close()
    except OSError:
        return False
    return True


def _own_address(master: str) -> str:
    """Return the address that this host talks to `master` from; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master, 9))
        return str(probe.getsockname()[0])


def _answer(listener: socket.socket) -> None:
    while True:
        with suppress(OSError):
            listener.accept()[0].close()
