"""What a private Slurm needs of the machine; `python tests/slurm/slurm_packages.py` installs it where that is allowed."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

# Debian's and Ubuntu's package of each command (or file). libslurm-dev has the headers that a SPANK plugin is built with.
SLURM = {
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "sbatch": "slurm-wlm",
    "munged": "munge",
    "/usr/include/slurm/spank.h": "libslurm-dev",
}
ACCOUNTING = {"slurmdbd": "slurmdbd", "mariadbd": "mariadb-server", "mariadb-install-db": "mariadb-server"}
LOGIN = {"sshd": "openssh-server", "ssh": "openssh-client", "ssh-keygen": "openssh-client"}  # a login node, by loopback
# What container_plugin.c is compiled with, and what the small image is made of.
CONTAINERS = {
    "gcc": "gcc",
    "/usr/include/stdio.h": "libc6-dev",
    "mksquashfs": "squashfs-tools",
    "busybox": "busybox-static",
}
# What the training image is built from where no registry is reached; its Debian's keys are not every Debian's.
IMAGE = {"mmdebstrap": "mmdebstrap", "/usr/share/keyrings/debian-archive-keyring.gpg": "debian-archive-keyring"}
SBIN = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
POLICY = Path("/usr/sbin/policy-rc.d")
LIMIT = 600  # seconds for each call of apt-get


def missing(accounting: bool = False) -> list[str]:
    """List the packages of a private Slurm that are not installed."""
    return lacking(SLURM | (ACCOUNTING if accounting else {}))


def lacking(wanted: Mapping[str, str]) -> list[str]:
    """List the packages of those commands and files that are not there."""
    absent = [name for name in wanted if not (Path(name).exists() or shutil.which(name, path=SBIN))]
    return sorted({wanted[name] for name in absent})


def reason(accounting: bool = False) -> str:
    """Say why a private Slurm cannot be started here, and what to do; "" if it can."""
    if packages := missing(accounting):
        return f"missing packages; as root: apt-get install {' '.join(packages)}"
    if os.geteuid() != 0:
        return "must be root: the nodes are namespaces with devices of their own, and slurmd starts jobs as their users"
    if subprocess.run(["unshare", "--mount", "--uts", "true"], capture_output=True, timeout=30, check=False).returncode:
        return "not allowed to make namespaces; a container needs the capability SYS_ADMIN for it (docker run --privileged)"
    return ""


@contextmanager
def no_daemons() -> Iterator[None]:
    """Keep the packages' scripts from starting what they install, by the means that Debian has for it."""
    if POLICY.exists():
        yield  # somebody's rule, and not ours to change
        return
    POLICY.write_text("#!/bin/sh\nexit 101\n")
    POLICY.chmod(0o755)
    try:
        yield
    finally:
        POLICY.unlink()


def install(packages: list[str]) -> None:
    """Call apt-get; the lists of packages are only fetched anew when the present ones do not do."""
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    call = ["apt-get", "install", "--yes", "--quiet", "--no-install-recommends", *packages]
    with no_daemons():
        if subprocess.run(call, env=environment, timeout=LIMIT, check=False).returncode != 0:
            subprocess.run(["apt-get", "update", "--quiet"], env=environment, timeout=LIMIT, check=True)
            subprocess.run(call, env=environment, timeout=LIMIT, check=True)


def main() -> int:
    """Install what is missing, or say what that is; 0 when a private Slurm can be started."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-accounting", action="store_true", help="leave slurmdbd and its database out")
    parser.add_argument("--check", action="store_true", help="install nothing")
    words = parser.parse_args()
    # Without the latter, their tests are skipped.
    packages = missing(not words.no_accounting) + lacking(LOGIN | CONTAINERS | IMAGE)
    if packages and os.geteuid() == 0 and shutil.which("apt-get") and not words.check:
        print(f"installing {' '.join(packages)}", flush=True)
        try:
            install(packages)
        except subprocess.SubprocessError as error:
            print(f"apt-get could not install {' '.join(packages)}: {error}", file=sys.stderr)
            return 3
    if why := reason(not words.no_accounting):
        print(f"no private Slurm on this machine: {why}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
