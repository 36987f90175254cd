"""Start pretrain's job script by hand, with faults in its ranks; shared by the fast tests and tests/faults."""

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

from micro import MICRO, PROJECT, environment

from pipeline.cluster.load import open_cluster
from pipeline.config.load import load_config
from pipeline.files import read_json, read_lines
from pipeline.plan.jobs import make_plan
from pipeline.run.folder import Run
from pipeline.run.owner import current
from pipeline.submit.run_folder import prepare, run_of

FAST = ("pretrain.log_interval=1", "pretrain.save_interval=10", "pretrain.max_steps=40", "pretrain.keep_last=100")


def make_data(folder: Path, corpus: Path) -> Path:
    """Tokenize once; the Runs of all tests take a copy."""
    config = folder / "data.yaml"
    config.write_text(MICRO.format(runs=folder / "runs", corpus=corpus), encoding="utf-8")
    subprocess.run(
        [sys.executable, "-m", "pipeline", "submit", str(config), "--cluster", "local", "--only", "tokenize"],
        cwd=PROJECT, env=environment(), check=True, capture_output=True,
    )  # fmt: skip
    return config


def make_run(config: Path, name: str, *overrides: str) -> Run:
    """Make a Run that has its data and that nobody has trained; with more ranks than cores if that is wanted."""
    wanted = load_config(config, [*FAST, f"name={name}", *overrides])
    run, cluster = run_of(wanted), open_cluster("local", sys.executable)
    cluster = cluster.model_copy(update={"cores": 0})  # not known, so not compared with the ranks
    prepare(run, wanted, make_plan(wanted, cluster, run), cluster)
    shutil.copytree(config.parent / "runs" / "micro" / "data", run.data, dirs_exist_ok=True)
    return run


class Attempt:
    """One start of the job script, with its log in the Run's folder."""

    def __init__(
        self, run: Run, number: int = 0, inject: str = "", job: str = "1", stage: str = "pretrain", **changes: str
    ) -> None:
        self.run, self.number, self.job = run, number, job
        self.log = run.log(stage, job, number)
        changes |= {"PIPELINE_JOB_ID": job, "PIPELINE_ATTEMPT": str(number)}
        changes |= {"PIPELINE_INJECT": inject} if inject else {}
        with self.log.open("ab") as output:
            # A caller in the background of a shell ignores SIGINT and SIGQUIT, and so would all that it starts.
            self.process = subprocess.Popen(
                ["env", "--default-signal", "bash", str(run.snapshot / "sbatch" / f"{stage}.sbatch"), str(run.root)],
                stdout=output, stderr=output, env=environment(**changes), start_new_session=True,
            )  # fmt: skip

    def wait(self, seconds: float = 90) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise AssertionError(f"still running after {seconds} s:\n{self.text()}") from None

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    @property
    def verdict(self) -> dict[str, Any]:
        return read_json(self.run.verdict(self.job, self.number)) or {}

    def wait_for_step(self, step: int, seconds: float = 60) -> None:
        wait_for(lambda: any(row["step"] >= step for row in read_lines(self.run.metrics)), seconds, self)


def wait_for(condition: Callable[[], object], seconds: float, attempt: Attempt) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain\n{attempt.text()}"
        assert attempt.process.poll() is None, f"ended early\n{attempt.text()}"
        time.sleep(0.02)


def processes_of(run: Run) -> dict[int, str]:
    """Return pid and command line of this machine's processes that name the Run's folder."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if f"{run.root} " in line and path.parent.name != str(os.getpid()):
            found[int(path.parent.name)] = line
    return found


def ranks_of(run: Run) -> dict[int, int]:
    """Return the pid of each rank (0 where there is no launcher)."""
    found = {}
    for pid, line in processes_of(run).items():
        if "torch.distributed.run" in line or "pipeline.stages." not in line:
            continue
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        found[next((int(v[5:]) for v in variables if v.startswith("RANK=")), 0)] = pid
    return found


def launcher_of(run: Run) -> int:
    return next(pid for pid, line in processes_of(run).items() if "torch.distributed.run" in line)


def events(run: Run, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_lines(run.events) if event["event"] == kind]


def losses(run: Run) -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in read_lines(run.metrics)]


def left_over(run: Run) -> list[str]:
    """Return what a complete attempt should not have left: processes, an owner, temporary files."""
    files = [path for path in run.root.rglob("*") if path.name.endswith((".tmp", ".old"))]
    owner = [run.owner] if current(run.owner)[1] is not None else []
    return [*processes_of(run).values(), *map(str, [*files, *owner])]


def weights(run: Run, step: int) -> dict[str, str]:
    files = json.loads((run.checkpoint(step) / "manifest.json").read_text())["files"]
    hashes = {name: file["sha256"] for name, file in files.items() if name.endswith(".bin")}
    assert hashes, f"{run.checkpoint(step)}: no weights in {sorted(files)}"
    return hashes
