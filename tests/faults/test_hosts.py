"""Ranks that are alone on their hosts, started as srun starts them: one that is stopped or killed is named by another."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from by_hand import make_data, make_run, processes_of
from micro import environment

from pipeline.files import read_json
from pipeline.run.folder import Run

RANKS = 3
KEYS = (
    "pretrain.max_steps=24",
    "pretrain.micro_batch_size=1",
    "pretrain.hang_timeout=4",
    "pretrain.global_batch_size=3",
)
SECONDS = 90


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    if os.geteuid() != 0 or subprocess.run(["unshare", "--uts", "true"], check=False).returncode != 0:
        pytest.skip("a host name of its own needs root")
    return make_data(tmp_path_factory.mktemp("hosts"), corpus)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def start(run: Run, rank: int, port: int, inject: str) -> subprocess.Popen[bytes]:
    """Start one rank on a host of its own: with a host name, and processes, that the others do not have."""
    variables = {"RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": rank}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PIPELINE_JOB_ID": 1, "PIPELINE_ATTEMPT": 0}
    variables |= {"PIPELINE_STAGE": "pretrain", "PIPELINE_INJECT": inject, "OMP_NUM_THREADS": 1}
    command = f'hostname node{rank} && exec "{sys.executable}" -m pipeline.stages.pretrain "{run.root}"'
    with run.log("pretrain", "1", 0).open("ab") as output:
        return subprocess.Popen(
            ["unshare", "--uts", "sh", "-c", command], stdout=output, stderr=output,
            env=environment(**{name: str(value) for name, value in variables.items()}),
        )  # fmt: skip


def train(run: Run, inject: str) -> float:
    """Train until the first rank ends, and end the others as `srun --kill-on-bad-exit` does; return when that was."""
    port = free_port()
    ranks = [start(run, rank, port, inject) for rank in range(RANKS)]
    try:
        deadline = time.monotonic() + SECONDS
        while all(rank.poll() is None for rank in ranks):
            assert time.monotonic() < deadline, run.log("pretrain", "1", 0).read_text()
            time.sleep(0.1)
        ended = time.time()
        time.sleep(10)  # what is not told by then is not told
        return ended
    finally:
        for rank in ranks:
            with suppress(ProcessLookupError):
                rank.send_signal(signal.SIGKILL)
            rank.wait()


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("fault", ["stop", "kill"])
def test_a_rank_alone_on_its_host_is_named(data: Path, fault: str, rank: int) -> None:
    run = make_run(data, f"{fault}-{rank}", *KEYS)
    train(run, f"rank={rank},step=5,do={fault}")
    told = read_json(run.verdict("1", 0))
    text = run.log("pretrain", "1", 0).read_text()
    assert told, text
    print(told["verdict"], told["reason"])
    assert told["verdict"] == {"stop": "hang", "kill": "crash"}[fault], text
    assert f"rank {rank} on node{rank}" in told["reason"], text
    assert "after step 4" in told["reason"], text
    assert not processes_of(run)
