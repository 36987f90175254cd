"""What is missing is named; it is installed only by root, and nothing that is installed begins to run by itself.

Each call sees an empty /usr/sbin, so no Slurm, in a mount namespace of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="must be root: mounts an empty folder over /usr/sbin")

CALL = [sys.executable, str(Path(__file__).with_name("slurm_packages.py"))]
HIDE = 'mount -t tmpfs none /usr/sbin && "$@"; rc=$?; ls -A /usr/sbin; exit $rc'
APT = """#!/bin/sh
/bin/sh /usr/sbin/policy-rc.d
echo "$* policy $?" >>{log}
grep -q update {log}
"""


def hidden(*words: str, path: str = os.defpath) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["unshare", "--mount", "sh", "-c", HIDE, "sh", *CALL, *words],
        capture_output=True, text=True, timeout=30, check=False, env={"PATH": path},
    )  # fmt: skip


@pytest.mark.parametrize("words", [("--no-accounting",), ()])
def test_missing_packages_are_named(words: tuple[str, ...]) -> None:
    done = hidden("--check", *words)
    assert done.returncode == 3
    assert "as root: apt-get install " in done.stderr
    assert "munge" in done.stderr
    assert "slurm-wlm" in done.stderr
    assert ("mariadb-server" in done.stderr) == (not words)


def test_an_installation_starts_no_daemon_and_leaves_no_rule(tmp_path: Path) -> None:
    log = tmp_path / "log"
    apt = tmp_path / "apt-get"
    apt.write_text(APT.format(log=log))
    apt.chmod(0o755)
    done = hidden("--no-accounting", path=f"{tmp_path}:{os.defpath}")
    assert done.returncode == 3, "apt-get installed nothing"
    assert "missing packages" in done.stderr
    install, update, again = log.read_text().splitlines()
    assert install.startswith("install --yes ")
    assert "munge slurm-wlm" in install
    assert install.endswith("policy 101")
    assert update == "update --quiet policy 101"
    assert again == install
    assert "policy-rc.d" not in done.stdout


def test_a_user_is_told_to_be_root() -> None:
    done = subprocess.run(
        ["unshare", "--user", *CALL, "--no-accounting"], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 3
    assert "must be root" in done.stderr or "as root: apt-get install" in done.stderr
