"""Start the ranks of a preflight as srun would; "nodes" are processes of this machine."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import environment

from pipeline.files import read_json
from pipeline.run.folder import Run
from pipeline.submit.ask import request
from pipeline.submit.run_folder import prepare


def make_run(config: Path, *overrides: str) -> Run:
    wanted = request([str(config), *overrides], "local", None)
    prepare(wanted.run, wanted.config, wanted.plan)
    return wanted.run


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Nodes:
    """Two nodes with one rank each, as srun would start them; what is not started does not arrive."""

    def __init__(self, run: Run) -> None:
        self.run, self.port = run, free_port()
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, rank: int, **changes: str) -> None:
        variables = {
            "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port), "GLOO_SOCKET_IFNAME": "lo",
            "PIPELINE_JOB_ID": "7", "PIPELINE_ATTEMPT": "0", "PIPELINE_STARTED": "1.5", "PIPELINE_STAGE": "pretrain",
            "PIPELINE_NODES": "n1,n2", "SLURMD_NODENAME": f"n{rank + 1}",
        }  # fmt: skip
        with self.log(rank).open("wb") as log:
            self.processes[rank] = subprocess.Popen(
                [sys.executable, "-m", "pipeline.stages.preflight", str(self.run.root)],
                stdout=log, stderr=subprocess.STDOUT, env=environment(**(variables | changes)),
            )  # fmt: skip

    def log(self, rank: int) -> Path:
        return self.run.logs / f"rank{rank}.log"

    def end(self, seconds: float = 90) -> dict[int, int]:
        return {rank: process.wait(seconds) for rank, process in self.processes.items()}

    @property
    def said(self) -> dict[str, Any]:
        """What rank 0 said of the end; no host is here to make a verdict of it."""
        return read_json(self.run.said("7", 0)) or {}

    @property
    def report(self) -> dict[str, Any]:
        return read_json(self.run.preflight("7", 0)) or {}

    def wait_for_record(self, text: str) -> None:
        deadline = time.monotonic() + 60
        folder = self.run.preflight_records("7", 0)
        while not any(text in path.read_text() for path in folder.glob("*.json")):
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.05)


@pytest.fixture
def nodes(micro: Path) -> Iterator[Callable[..., Nodes]]:
    made: list[Nodes] = []

    def make(*overrides: str) -> Nodes:
        made.append(Nodes(make_run(micro, *overrides)))
        return made[-1]

    yield make
    for group in made:
        for process in group.processes.values():
            process.kill()
            process.wait(30)
