"""The product on a real Slurm: one chain, and what a cluster does to it in six weeks. Results equal the twin's, bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from private_slurm import PrivateSlurm

from pipeline.files import read_json, read_lines
from pipeline.run.folder import Run
from pipeline.run.job_ledger import read_ledger

PROJECT = Path(__file__).resolve().parents[2]
STEPS = 60
Record = dict[str, Any]

CONFIG = """\
name: {name}
runs_dir: {folder}/runs
threads: 1
data: {folder}/corpus/*.py
tokenize: {{vocab_size: 400, validation_fraction: 0.3}}
model: {{hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2}}
pretrain:
  max_steps: {steps}
  nodes: 2
  nproc_per_node: 1
  global_batch_size: 4
  micro_batch_size: 1
  sequence_length: 32
  warmup_steps: 2
  save_interval: 10
  log_interval: 1
inference: {{prompts: ["def "], max_new_tokens: 8}}
"""
CLUSTER = """\
scheduler: slurm
cpus_per_task: 1
signal_lead: 60
sbatch: {mem: 2000M}
env: {GLOO_SOCKET_IFNAME: lo}
"""


class Chain:
    """One Run on the private Slurm, by the product's own command line."""

    def __init__(self, slurm: PrivateSlurm, folder: Path, name: str) -> None:
        self.slurm, self.folder, self.run = slurm, folder, Run(folder / "runs" / name)
        self.project = PROJECT
        self.config, self.cluster = folder / f"{name}.yaml", folder / "site.yaml"
        self.config.write_text(CONFIG.format(name=name, folder=folder, steps=STEPS))
        self.cluster.write_text(CLUSTER)

    def command(self, *words: object) -> list[str]:
        return [sys.executable, "-m", "pipeline", *map(str, words)]

    @property
    def environment(self) -> dict[str, str]:
        code = {"PYTHONPATH": str(self.project), "PYTHONSAFEPATH": "1"}  # not the folder that the tests are run in
        return self.slurm.env | code | {"COLUMNS": "160", "NO_COLOR": "1"}

    def verb(self, *words: object, code: int = 0) -> str:
        done = subprocess.run(
            self.command(*words), env=self.environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    def submit(self, *overrides: str, slow: float = 0.0) -> None:
        """Submit the chain; `slow` seconds of sleep in each step leave time for something to happen."""
        self.verb("submit", self.config, "--cluster", self.cluster, *overrides)
        if slow:
            self.slow(slow)

    def slow(self, seconds: float) -> None:
        with self.run.launch("pretrain").open("a") as file:
            file.write(f"export PIPELINE_INJECT='rank=0,step=1,do=slow,seconds={seconds}'\n")

    def status(self) -> Record:
        words = self.command("status", self.run.root, "--json")
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=60, check=False)
        found: Record = json.loads(done.stdout)
        return found

    def jobs(self, stage: str) -> list[str]:
        """Return the ids of a Stage's Jobs, but those beside training, in the order of submission."""
        records = read_ledger(self.run)
        return [str(r.job_id) for r in records if r.stage == stage and r.role != "beside" and r.job_id]

    def job(self, stage: str, number: int = 1) -> str:
        """Return the id of the first, second, … Job of a Stage."""
        return self.jobs(stage)[number - 1]

    def wait_for(self, what: str, condition: Callable[[], object], timeout: float = 120, pause: float = 0.2) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"waited {timeout:.0f} s for {what}\n{self.logs()}")
            time.sleep(pause)

    def wait_for_step(self, step: int, timeout: float = 120) -> None:
        self.wait_for(f"step {step}", lambda: any(row["step"] >= step for row in read_lines(self.run.metrics)), timeout)

    def wait_for_state(self, state: str, timeout: float = 180) -> Record:
        found: Record = {}

        def reached() -> bool:
            found.update(self.status())
            assert found["state"] in (state, "pending", "running"), f"{found}\n{self.logs()}"
            return bool(found["state"] == state)

        self.wait_for(f"a Run that is {state}", reached, timeout, 2.0)
        return found

    def logs(self) -> str:
        tails = [
            f"==> {p.name}\n" + "\n".join(p.read_text(errors="replace").splitlines()[-25:])
            for p in sorted(self.run.logs.glob("*.log"))
        ]
        queue = self.slurm.run("squeue", "--states=all", check=False).stdout
        return "\n".join([*tails, queue, *(json.dumps(event) for event in read_lines(self.run.events))])

    def events(self, kind: str) -> list[Record]:
        return [event for event in read_lines(self.run.events) if event["event"] == kind]

    def result(self) -> dict[str, object]:
        """Return what two Runs of the same config must agree in: weights and optimizer, losses, scores."""
        manifest = read_json(self.run.checkpoint(STEPS) / "manifest.json")
        weights = {name: file["sha256"] for name, file in manifest["files"].items() if name.endswith(".bin")}
        losses = [(row["step"], row["loss"]) for row in read_lines(self.run.metrics)]
        return {
            "weights": weights,
            "losses": losses,
            "score": read_json(self.run.scores(STEPS) / "bits_per_byte.json")["score"],
        }


def git(*words: object) -> str:
    call = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", *map(str, words)]
    return subprocess.run(call, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


def commit(repository: Path, message: str) -> str:
    """Commit all that is in a folder, a repository from now on; return the commit."""
    git("init", "--quiet", repository)
    git("-C", repository, "add", "--all")
    git("-C", repository, "commit", "--quiet", f"--message={message}")
    return git("-C", repository, "rev-parse", "HEAD")


def is_rank(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"pipeline.stages.pretrain" in words and b"torch.distributed.run" not in words and b"bash" not in words


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chain")
    corpus = folder / "corpus"
    corpus.mkdir()
    for path in sorted((PROJECT / "pipeline" / "lm").glob("*.py"))[:24]:
        (corpus / path.name).write_text(path.read_text())
    return folder


@pytest.fixture(scope="module")
def twin(slurm: PrivateSlurm, folder: Path) -> Chain:
    """The whole chain, undisturbed, on two nodes."""
    chain = Chain(slurm, folder, "twin")
    chain.submit()
    chain.wait_for_state("completed")
    return chain


@pytest.fixture
def chain(slurm: PrivateSlurm, folder: Path, request: pytest.FixtureRequest) -> Chain:
    return Chain(slurm, folder, request.node.name.removeprefix("test_")[:60])


def test_the_whole_chain_from_one_command(twin: Chain) -> None:
    assert [(job["stage"], job["state"]) for job in twin.status()["jobs"]] == [
        ("tokenize", "completed"), ("pretrain", "completed"), ("evaluate", "completed"), ("inference", "completed"),
    ]  # fmt: skip
    assert twin.run.report.is_file()
    assert twin.run.samples(STEPS).is_file()
    assert twin.verb("submit", twin.config, "--cluster", twin.cluster) == ""  # again: complete already
    hosts = {event["host"] for event in twin.events("start")}
    assert hosts <= {"n1", "n2", "n3"}


class Careless(Chain):
    """A chain of somebody whose shell holds a cloud's key."""

    @property
    def environment(self) -> dict[str, str]:
        return super().environment | {"CLOUD_KEY": "canary-of-the-shell"}


def test_secrets_reach_the_ranks_and_nothing_that_is_kept(slurm: PrivateSlurm, folder: Path) -> None:
    chain = Careless(slurm, folder, "secrets")
    secrets = folder / "secrets"
    secrets.write_text("# mine\nTRACKER_KEY='canary-$(of) the file'\n")
    secrets.chmod(0o600)
    chain.cluster = folder / "secrets.site.yaml"
    chain.cluster.write_text(CLUSTER + f"secret_env: [TRACKER_KEY]\nsecret_file: {secrets}\n")
    chain.submit(slow=0.3)
    chain.wait_for_step(5)
    kept = folder_texts(chain.run.root) + folder_texts(slurm.root)  # while Slurm still has what it keeps of the Job
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*") if int(path.name) != os.getpid()]
    ranks = [environment_of(pid) for pid in pids if is_rank(pid) and str(chain.run.root) in command_of(pid)]
    others = [environment_of(pid) for pid in pids if "sbatch/watch.sh" in command_of(pid)]
    assert len(ranks) == 2
    assert len(others) >= 1
    assert all("TRACKER_KEY=canary-$(of) the file" in found for found in ranks)
    assert all(name in "".join(found) for found in ranks for name in ("HOME=", "PATH=", "SLURM_CONF="))
    assert not any("canary" in found for found in ["".join(found) for found in others])
    assert not any("canary-of-the-shell" in "".join(found) for found in ranks)
    chain.wait_for_state("completed")
    kept += folder_texts(chain.run.root) + folder_texts(slurm.root)
    kept.append(slurm.run("scontrol", "--details", "show", "job").stdout)
    assert len(kept) > 150
    assert not [text for text in kept if "canary" in text]


def folder_texts(folder: Path) -> list[str]:
    texts = []
    for path in folder.rglob("*"):
        try:
            if path.is_file():
                texts.append(path.read_text(encoding="utf-8", errors="replace"))
        except OSError:  # it is gone since
            continue
    return texts


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
    except OSError:
        return ""


def environment_of(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
    except OSError:
        return []


def test_time_limit_in_the_middle_goes_on_in_the_next_segment(chain: Chain, twin: Chain) -> None:
    chain.submit("pretrain.time=2:00", slow=1.6)
    chain.wait_for("the first Segment's end", lambda: chain.run.verdict(chain.job("pretrain", 1), 0).is_file(), 150)
    first = read_json(chain.run.verdict(chain.job("pretrain", 1), 0))
    assert first["verdict"] == "stopped"
    assert 0 < first["step"] < STEPS
    chain.wait_for_state("completed", 240)
    assert chain.result() == twin.result()
    assert chain.events("resume")[0]["step"] == first["step"]
    assert chain.events("resume")[0]["job_id"] == chain.job("pretrain", 2)


def test_a_git_pull_in_the_middle_and_a_requeue_keep_the_code_and_every_log(
    chain: Chain, twin: Chain, note: Callable[[str], None], tmp_path: Path
) -> None:
    upstream, chain.project = tmp_path / "upstream", tmp_path / "checkout"
    for name in ("pipeline", "sbatch"):
        shutil.copytree(PROJECT / name, upstream / name, ignore=shutil.ignore_patterns("__pycache__"))
    (upstream / ".gitignore").write_text("__pycache__/\n")
    first = commit(upstream, "works")
    git("clone", "--quiet", upstream, chain.project)
    chain.submit(slow=0.3)
    assert (read_json(chain.run.record)["commit"], read_json(chain.run.record)["modified"]) == (first, False)
    chain.wait_for_step(25)
    for path in [*upstream.rglob("*.py"), *upstream.rglob("*.sbatch"), *upstream.rglob("*.sh")]:
        path.write_text("exit 9 # half done\n" if path.suffix != ".py" else "raise SystemExit('half done')\n")
    commit(upstream, "does not work")
    git("-C", chain.project, "pull", "--quiet")
    chain.verb("status", chain.run.root, code=1)  # what was pulled is really broken
    chain.project = PROJECT
    job = chain.job("pretrain")
    chain.slurm.run("scontrol", "update", f"JobId={job}", "Requeue=1")  # a Segment is not requeued without that
    chain.slurm.run("scontrol", "requeue", job)
    chain.wait_for("attempt 1", lambda: chain.run.beginning(job, 1).is_file(), 90)
    granted = time.time()
    before = max(row["step"] for row in read_lines(chain.run.metrics))
    chain.wait_for_step(before + 1)
    note(f"{time.time() - granted:.1f} s from a requeue granted to the first new step (goal 30)")
    chain.wait_for_state("completed")
    assert chain.result() == twin.result()
    note("a git pull of broken code in the middle of the run changed nothing: result equals the twin's")
    assert [chain.run.log("pretrain", job, attempt).is_file() for attempt in (0, 1)] == [True, True]


def test_preemption_costs_minutes_not_the_run(chain: Chain, twin: Chain) -> None:
    chain.submit(slow=0.3)
    chain.wait_for_step(25)
    successor = chain.job("pretrain", 2)
    chain.slurm.submit("sleep 8", "--partition=high", "--nodes=3", "--exclusive")
    chain.wait_for("the next Segment", lambda: chain.run.beginning(successor, 0).is_file(), 120)
    chain.wait_for_state("completed")
    assert chain.result() == twin.result()


def test_dead_node_whose_ranks_live_on_cannot_spoil_the_run(chain: Chain, twin: Chain) -> None:
    chain.submit(slow=0.5)
    chain.wait_for_step(25)
    job, successor = chain.job("pretrain"), chain.job("pretrain", 2)
    node = read_json(chain.run.beginning(job, 0))["nodes"][0]
    ranks = [pid for pid in chain.slurm.pids_on(node) if is_rank(pid)]
    assert ranks
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)  # asleep while the others are killed, and awake again when the Run has moved on
    chain.slurm.kill_node(node)
    chain.wait_for("the next Segment", lambda: chain.run.beginning(successor, 0).is_file(), 150)
    chain.wait_for_step(max(row["step"] for row in read_lines(chain.run.metrics)) + 1)
    assert node not in read_json(chain.run.beginning(successor, 0))["nodes"]
    for pid in ranks:
        os.kill(pid, signal.SIGCONT)  # and back, in the middle of what it did
    chain.wait_for_state("completed")
    assert chain.result() == twin.result()
    assert {event["job_id"] for event in chain.events("save") if "job_id" in event} == {job, successor}
