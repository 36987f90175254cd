"""From a laptop: no Slurm here, and a login node behind a real sshd, in whose folders every careless quotation breaks."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from loopback_ssh import LoopbackSsh, why_not
from private_slurm import PrivateSlurm, new_root
from test_chain import CONFIG, PROJECT

from pipeline.cluster.load import load_cluster
from pipeline.cluster.login import find_quoting
from pipeline.run.folder import Run
from pipeline.slurm.commands import Slurm

HOSTILE = 'it\'s "$(touch hacked)"; `touch hacked` & x'
WORDS = [HOSTILE, "", "a  b", "*", "~", "$HOME", "\\", "-n", "é\tx", "!!", "a\nb"]
CLUSTER = """\
scheduler: slurm
name: far
python: {python}
host_python: {python}
cpus_per_task: 1
signal_lead: 60
sbatch: {{mem: 2000M}}
env: {{GLOO_SOCKET_IFNAME: lo}}
login: {{prefix: {prefix}, root: {root}}}
"""
Verb = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def login(slurm: PrivateSlurm) -> Iterator[LoopbackSsh]:
    if why := why_not():
        pytest.skip(why)
    variables = {"SLURM_CONF": slurm.env["SLURM_CONF"], "PATH": slurm.env["PATH"]}
    # The path of a socket has at most 108 characters, and pytest's folders alone may have as many.
    with new_root() as folder, LoopbackSsh(Path(folder) / "login", variables) as login:
        yield login


@pytest.fixture
def laptop(tmp_path: Path) -> Verb:
    """Run the product in tmp_path without any variable that reaches the private Slurm."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    environment |= {"PYTHONPATH": str(PROJECT), "NO_COLOR": "1", "COLUMNS": "120"}

    def verb(*words: object, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "pipeline", *map(str, words)], env=environment, cwd=tmp_path, capture_output=True,
            text=True, timeout=timeout, check=False,
        )  # fmt: skip

    return verb


def test_a_chain_is_submitted_watched_and_read_from_a_laptop(
    login: LoopbackSsh, laptop: Verb, tmp_path: Path, note: Callable[[str], None]
) -> None:
    corpus = tmp_path / HOSTILE / "corpus"
    corpus.mkdir(parents=True)
    for path in sorted((PROJECT / "pipeline" / "lm").glob("*.py"))[:24]:
        (corpus / path.name).write_text(path.read_text())
    config, cluster, here = tmp_path / "far.yaml", tmp_path / "cluster.yaml", Run(tmp_path / "runs" / "far")
    text = CONFIG.format(name="far", folder=tmp_path, steps=20).replace("nodes: 2", "nodes: 1")
    data = json.dumps(str(corpus).replace("$", "$$") + "/*.py")
    config.write_text(text.replace(f"data: {tmp_path}/corpus/*.py", f"data: {data}"))
    root = tmp_path / HOSTILE / "runs"
    cluster.write_text(
        CLUSTER.format(python=sys.executable, prefix=json.dumps(login.prefix), root=json.dumps(str(root)))
    )
    began = time.monotonic()
    submitted = laptop("submit", config, "--cluster", cluster)
    assert submitted.returncode == 0, submitted.stderr
    note(f"{time.monotonic() - began:.1f} s to submit four Jobs through ssh")
    began = time.monotonic()
    assert json.loads(laptop("status", here.root, "--json").stdout)["state"] in ("pending", "running")
    note(f"{time.monotonic() - began:.1f} s for status through ssh")
    followed = laptop("logs", "-f", here.root, timeout=200)
    assert followed.returncode == 0, followed.stderr
    for stage in ("tokenize", "pretrain", "evaluate", "inference"):
        assert f"==> {stage}-" in followed.stdout
    status: dict[str, Any] = json.loads(laptop("status", here.root, "--json").stdout)
    assert (status["state"], status["step"]) == ("completed", 20), followed.stdout
    assert laptop("report", here.root).returncode == 0
    assert here.report.read_bytes() == Run(root / "far").report.read_bytes()
    assert "complete already" in laptop("submit", config, "--cluster", cluster).stderr
    assert not list(tmp_path.rglob("hacked"))


def test_words_arrive_as_they_are_by_ssh_and_by_su(login: LoopbackSsh) -> None:
    su = ["su", "-", "root", "-c"]
    for prefix, quoting in ((login.prefix, "one-string"), (su, "one-string"), ([*login.prefix, *su], "two-strings")):
        assert find_quoting(prefix) == quoting
        said = Slurm(tuple(prefix), find_quoting(prefix)).run(["printf", "%s\\0", *WORDS])
        assert said.split("\0")[:-1] == WORDS, prefix


def test_a_cluster_file_is_written_from_a_laptop(login: LoopbackSsh, laptop: Verb, tmp_path: Path) -> None:
    made = laptop("init", "--cluster", "new.yaml", "--login", shlex.join(login.prefix))
    assert made.returncode == 0, made.stderr
    written = load_cluster(tmp_path / "new.yaml", "/no/python")
    assert written.login is not None
    assert (written.login.prefix, written.login.quoting) == (login.prefix, "one-string")
    assert (written.sbatch["partition"], written.gpus_per_node, written.gpu_type) == ("main", 4, "h100")
