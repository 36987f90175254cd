"""A Slurm of our own: controller, nodes, munge, fake GPUs, on this machine, in one folder; for tests and for trying out.

python tests/slurm/private_slurm.py start|env|stop ROOT
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import slurm_containers
from slurm_files import CONTROLLER, cgroup_conf, free_ports, gres_conf, hosts_file, slurm_conf, slurmdbd_conf
from slurm_packages import SBIN, reason
from slurm_processes import Processes, SlurmError, wait_until

# Variables by which Slurm's commands would be told something by the cluster, or the user, that we are started from.
FOREIGN = re.compile(r"S(LURM|BATCH|ALLOC|RUN|QUEUE|INFO|ACCT|CONTROL|PRIO|SHARE|CANCEL|LURMD)[A-Z]*_|SPRIO|SLURM")
LONGEST_ROOT = 60  # a Unix socket's path has 107 bytes at most


def clean_environment(root: Path) -> dict[str, str]:
    """Return this process's environment without any other Slurm's variables, and with ours."""
    kept = {name: value for name, value in os.environ.items() if not FOREIGN.match(name)}
    return kept | {"PATH": SBIN, "SLURM_CONF": str(root / "slurm.conf")}


def new_root() -> tempfile.TemporaryDirectory[str]:
    """Make a folder with a path that is short enough for sockets, as pytest's own are not."""
    return tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp", ignore_cleanup_errors=True)


class PrivateSlurm:
    """A Slurm in the folder `root`, which it makes, and removes in the end.

    `env` is what reaches it: the environment for any program that is to use this Slurm. Nodes n1, n2, … are hosts of
    their own name, with `cpus` CPUs, `memory` MB and `gpus` fake GPUs of the type h100. Partitions: main (the default),
    high (its jobs requeue those of main), short (at most 2 minutes). `settings` change slurm.conf,
    `containers`: srun takes --container-image. `plugstack` is more text for plugstack.conf.
    """

    def __init__(
        self, root: Path, nodes: int = 3, *, cpus: int = 8, memory: int = 8000, gpus: int = 4,
        accounting: bool = False, containers: bool = False, plugstack: str = "", settings: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.root = root.absolute()
        self.nodes = [f"n{number}" for number in range(1, nodes + 1)]
        self.cpus, self.memory, self.gpus, self.accounting = cpus, memory, gpus, accounting
        self.containers, self.plugstack, self.settings = containers, plugstack, dict(settings or {})
        self.env = clean_environment(self.root)
        self.processes = Processes(self.root, self.env)

    def __enter__(self) -> PrivateSlurm:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> PrivateSlurm:
        """Start everything and return when all nodes are idle; on any failure nothing is left behind."""
        if why := reason(self.accounting) or (slurm_containers.reason() if self.containers else ""):
            raise SlurmError(f"no private Slurm on this machine: {why}")
        if len(str(self.root)) > LONGEST_ROOT:
            raise SlurmError(
                f"{self.root}: a path of at most {LONGEST_ROOT} characters is needed, for the sockets in it"
            )
        if self.root.exists() and any(self.root.iterdir()):
            raise SlurmError(f"{self.root} is not empty: stop the Slurm in it, or choose another folder")
        try:
            self._write_files()
            self._start_daemons()
        except BaseException:
            self.stop()
            raise
        return self

    def _write_files(self) -> None:
        for name in ("log", "state", "dev", "munge", *(f"spool/{node}" for node in self.nodes)):
            (self.root / name).mkdir(mode=0o755, parents=True)
        self.root.chmod(0o755)  # munge wants a socket that everybody reaches
        cluster = f"private{secrets.token_hex(4)}"
        devices = [self.root / "dev" / f"gpu{number}" for number in range(self.gpus)]
        for device in devices:
            os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))  # /dev/null by another name
        version = subprocess.run(["slurmd", "-V"], env=self.env, capture_output=True, text=True, timeout=30, check=True)
        if self.containers:
            self.plugstack += slurm_containers.plugstack(self.root / "containers")
        texts = {
            "cgroup.conf": cgroup_conf(tuple(int(word) for word in re.findall(r"\d+", version.stdout))),
            "hosts": hosts_file(self.nodes),
            "plugstack.conf": self.plugstack,
            "gres.conf": gres_conf(self.nodes, devices),
            "slurm.conf": slurm_conf(
                self.root, cluster, self.nodes, cpus=self.cpus, memory=self.memory, gpus=self.gpus,
                accounting=self.accounting, settings=self.settings,
            ),
        }  # fmt: skip
        for name, text in texts.items():
            (self.root / name).write_text(text)
        key = self.root / "munge" / "key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(1024))

    def _start_daemons(self) -> None:
        munge = self.root / "munge"
        files = [
            f"--{name}={munge / name.split('-')[0]}"
            for name in ("key-file", "socket", "pid-file", "seed-file", "log-file")
        ]
        self.processes.start("munged", "munged", "--foreground", "--num-threads=2", "--origin=127.0.0.1", *files)
        self.processes.start_host(CONTROLLER)
        for node in self.nodes:
            mounts = slurm_containers.enroot_settings(self.root / "enroot", node) if self.containers else {}
            self.processes.start_host(node, mounts)
        self.processes.wait_for("munged", (munge / "socket").exists)
        if self.accounting:
            self._start_accounting()
        self.start_controller()
        for node in self.nodes:
            self._start_slurmd(node)
        used = self.run("scontrol", "show", "config").stdout
        if not re.search(rf"^SLURM_CONF\s*= {re.escape(str(self.root))}/slurm.conf$", used, re.MULTILINE):
            raise SlurmError("Slurm's commands read another slurm.conf than ours")
        for node in self.nodes:
            self.wait_for_node(node)

    def _start_slurmd(self, node: str) -> None:
        self.processes.start(f"slurmd.{node}", "slurmd", "-D", "-N", node, host=node)

    def _start_accounting(self) -> None:
        """Start a database that only its socket reaches, and slurmdbd."""
        data, socket = self.root / "db", self.root / "db.socket"
        self.run(
            "mariadb-install-db", "--no-defaults", f"--datadir={data}", "--user=root", "--skip-test-db", "--force",
            "--skip-name-resolve", "--auth-root-authentication-method=normal", timeout=120,
        )  # fmt: skip
        self.processes.start(
            "mariadbd", "mariadbd", "--no-defaults", f"--datadir={data}", "--user=root", f"--socket={socket}",
            "--skip-networking", f"--pid-file={self.root}/mariadbd.pid", "--innodb-buffer-pool-size=64M",
            "--innodb-lock-wait-timeout=900", "--innodb-flush-log-at-trx-commit=0",
        )  # fmt: skip
        self.processes.wait_for("mariadbd", socket.exists, 60)
        conf = self.root / "slurmdbd.conf"
        conf.touch(mode=0o600)  # slurmdbd refuses one that others may read
        port = free_ports(1)[0]
        conf.write_text(slurmdbd_conf(self.root, port))
        with (self.root / "slurm.conf").open("a") as file:
            file.write(f"AccountingStoragePort={port}\n")
        self.processes.start("slurmdbd", "slurmdbd", "-D", host=CONTROLLER, env={"MYSQL_UNIX_PORT": str(socket)})
        ping = ("sacctmgr", "--noheader", "show", "cluster")
        self.processes.wait_for("slurmdbd", lambda: self.run(*ping, check=False).returncode == 0, 60)
        cluster = re.findall(r"^ClusterName=(.*)$", (self.root / "slurm.conf").read_text(), re.MULTILINE)[-1]
        for words in (
            ["cluster", cluster],
            ["account", "default"],
            ["user", "root", "account=default", "adminlevel=Admin"],
        ):
            self.run("sacctmgr", "--immediate", "add", *words)

    def stop(self) -> None:
        """End exactly the processes that this Slurm started, jobs included, and remove the folder."""
        self.processes.kill("slurmctld")
        for host in self.processes.hosts():
            if host != CONTROLLER:
                self.processes.kill_host(host)
        for daemon in ("slurmdbd", "mariadbd", "munged"):
            self.processes.kill(daemon, signal.SIGTERM)
        if CONTROLLER in self.processes.known:
            self.processes.kill_host(CONTROLLER)  # slurmctld has a helper that outlives it for a moment
        shutil.rmtree(self.root, ignore_errors=True)

    def run(
        self, *words: str, check: bool = True, timeout: float = 30, cwd: Path | None = None, text: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command that uses this Slurm; `text` is its standard input. A failure raises, with what it said."""
        done = subprocess.run(
            words, env=self.env, cwd=cwd or self.root, input=text if text is not None else "",
            capture_output=True, text=True, timeout=timeout, check=False,
        )  # fmt: skip
        if check and done.returncode != 0:
            raise SlurmError(f"{' '.join(words)} ended with {done.returncode}: {(done.stderr + done.stdout).strip()}")
        return done

    def submit(self, script: str, *flags: str, cwd: Path | None = None) -> str:
        """Submit the text of a bash script and return the job's id."""
        return self.run("sbatch", "--parsable", *flags, cwd=cwd, text=f"#!/bin/bash\n{script}\n").stdout.strip()

    def job(self, job: str) -> dict[str, str]:
        """Return what Slurm knows of a job: JobState, Reason, Restarts, NodeList, ExitCode, TimeLimit …"""
        return dict(re.findall(r"(\S+?)=(\S*)", self.run("scontrol", "--oneliner", "show", "job", job).stdout))

    def wait_for(self, job: str, *states: str, timeout: float = 30) -> dict[str, str]:
        """Wait until a job is in one of the states (COMPLETED, RUNNING, …) and return what Slurm knows of it."""
        deadline = time.monotonic() + timeout
        while (known := self.job(job))["JobState"] not in states:
            if time.monotonic() > deadline:
                seen = f"{known['JobState']}, Reason={known['Reason']}"
                raise SlurmError(f"job {job} was not {' or '.join(states)} within {timeout:.0f} s: {seen}")
            time.sleep(0.2)
        return known

    def node_state(self, node: str) -> str:
        """Return a node's state: IDLE, MIXED, DOWN, IDLE+DRAIN, …; a star at the end: it does not answer."""
        found = re.search(r"State=(\S+)", self.run("scontrol", "--oneliner", "show", "node", node).stdout)
        return found[1] if found else ""

    def wait_for_node(self, node: str, timeout: float = 30) -> None:
        """Wait until a node takes jobs."""
        usable = ("IDLE", "MIXED", "ALLOCATED")
        self.processes.wait_for(f"slurmd.{node}", lambda: self.node_state(node) in usable, timeout)

    def kill_node(self, name: str) -> None:
        """Kill a node's slurmd, as a network that is gone would look like: what runs on the node lives on."""
        self.processes.kill(f"slurmd.{name}")

    def on_host(self, node: str, *words: object) -> None:
        """Run a command among the mounts of a node."""
        host = str(self.processes.known[node].pid)
        subprocess.run(["nsenter", f"--target={host}", "--mount", *map(str, words)], check=True, timeout=30)

    def revive_node(self, name: str) -> None:
        """Start a killed node's slurmd again, on the same host, and wait until the node takes jobs."""
        self._start_slurmd(name)
        self.wait_for_node(name, 60)

    def stop_controller(self) -> None:
        """Stop slurmctld: jobs run on, but no command of Slurm is answered."""
        self.processes.kill("slurmctld", signal.SIGTERM, 30)

    def start_controller(self) -> None:
        """Start slurmctld and wait until it answers; it knows what it knew when it was stopped."""
        self.processes.start("slurmctld", "slurmctld", "-D", host=CONTROLLER)
        self.processes.wait_for("slurmctld", lambda: self.run("scontrol", "ping", check=False).returncode == 0)

    def pids_on(self, node: str) -> list[int]:
        """List the processes on a node that are not slurmd: the jobs', and what Slurm runs for each step."""
        slurmd = self.processes.known[f"slurmd.{node}"].pid
        return [pid for pid in self.processes.pids_on(node) if pid != slurmd]

    def reset(self) -> None:
        """Make it as good as new for the next test: no jobs, no processes of jobs, all nodes idle."""
        if not self.processes.alive("slurmctld"):
            self.start_controller()
        self.run("scancel", "--user=root", "--quiet", "--full", "--signal=KILL", check=False)
        self.run("scancel", "--user=root", "--quiet", check=False)
        for node in self.nodes:
            if "DRAIN" in self.node_state(node):  # Slurm does so where a step's end found no controller for too long
                self.run("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)
            if not self.processes.alive(f"slurmd.{node}"):
                for pid in self.pids_on(node):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                self._start_slurmd(node)
        wait_until("an empty queue", lambda: not self.run("squeue", "--noheader").stdout, 60)
        for node in self.nodes:
            self.wait_for_node(node, 60)


def main() -> int:
    """Start a Slurm, say how it is reached, or stop it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("verb", choices=["start", "env", "stop"])
    parser.add_argument("root", type=Path, help="a new folder with a short path, like /tmp/slurm")
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--accounting", action="store_true", help="with a database and slurmdbd")
    parser.add_argument("--containers", action="store_true", help="with Pyxis, or what stands in for it")
    words = parser.parse_args()
    slurm = PrivateSlurm(words.root, words.nodes, accounting=words.accounting, containers=words.containers)
    try:
        if words.verb == "start":
            slurm.start()
            print(f'started; eval "$({sys.executable} {sys.argv[0]} env {slurm.root})"', file=sys.stderr)
        elif not slurm.processes.known:
            raise SlurmError(f"{slurm.root}: no private Slurm is there")
        elif words.verb == "stop":
            slurm.stop()
        if words.verb == "env":
            print("\n".join(f"unset {name}" for name in os.environ if FOREIGN.match(name)))
            print(f"export SLURM_CONF={slurm.env['SLURM_CONF']}")
    except SlurmError as error:
        print(f"private_slurm: {error}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
