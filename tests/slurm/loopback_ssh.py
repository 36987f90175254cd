"""A real sshd on this machine's loopback: in its own folder, on its own port, with its own keys."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from slurm_files import free_ports
from slurm_packages import LOGIN, SBIN, lacking

SERVER = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {root}/host_key
PidFile {root}/sshd.pid
AuthorizedKeysFile {root}/key.pub
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
SetEnv {variables}
"""
CLIENT = """\
Host login01
    HostName 127.0.0.1
    Port {port}
    User {user}
    IdentityFile {root}/key
    IdentitiesOnly yes
    UserKnownHostsFile {root}/known_hosts
    StrictHostKeyChecking accept-new
    BatchMode yes
    ConnectTimeout 10
    ControlMaster auto
    ControlPath {root}/%C
    ControlPersist 30
"""


def why_not() -> str:
    """Say why no sshd can be started here; "" if it can."""
    if packages := lacking(LOGIN):
        return f"missing packages; as root: apt-get install {' '.join(packages)}"
    if os.geteuid() != 0:
        return "must be root: sshd starts sessions as other users only then"
    return ""


class LoopbackSsh:
    """`prefix` are the words that reach the other side, whose sessions have `variables`."""

    def __init__(self, root: Path, variables: Mapping[str, str]) -> None:
        self.root, self.port = root, free_ports(1)[0]
        self.variables = " ".join(f"{name}={value}" for name, value in variables.items())

    @property
    def prefix(self) -> list[str]:
        return ["ssh", "-F", str(self.root / "ssh_config"), "login01"]

    def __enter__(self) -> LoopbackSsh:
        self.root.mkdir(mode=0o700, parents=True)
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd shuts its helpers into this empty folder
        for name in ("key", "host_key"):
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.root / name)]
            subprocess.run(words, check=True, timeout=30)
        (self.root / "sshd_config").write_text(SERVER.format(root=self.root, port=self.port, variables=self.variables))
        user = os.environ.get("USER") or "root"
        (self.root / "ssh_config").write_text(CLIENT.format(root=self.root, port=self.port, user=user))
        sshd = shutil.which("sshd", path=SBIN)
        assert sshd  # it wants to be called by its whole path
        words = [sshd, "-D", "-f", str(self.root / "sshd_config"), "-E", str(self.root / "log")]
        self.process = subprocess.Popen(words, start_new_session=True)
        self._wait()
        return self

    def _wait(self) -> None:
        deadline = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError((self.root / "log").read_text()) from None
                time.sleep(0.1)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        leave = [*self.prefix[:3], "-O", "exit", self.prefix[3]]  # the connection that calls share
        subprocess.run(leave, capture_output=True, timeout=30, check=False)
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)
