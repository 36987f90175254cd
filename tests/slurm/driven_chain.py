"""A Run on a private Slurm, driven and watched from outside: by commands, signals, the queue, and what lies in its folder.

Nothing here knows how the product keeps its records: Jobs are found by their comment in the queue, attempts by the
events of the Run.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from private_slurm import PrivateSlurm
from slurm_processes import SlurmError
from test_chain import STEPS, Chain, Record

from pipeline.files import read_json, read_lines

CONFIG = """\
name: {name}
runs_dir: {folder}/runs
threads: 1
data: {data}
tokenize: {{vocab_size: 400, validation_fraction: 0.3}}
model: {{hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 2}}
preflight: {{enabled: false}}
pretrain:
  max_steps: {steps}
  nodes: 1
  nproc_per_node: 1
  global_batch_size: 4
  micro_batch_size: 4
  sequence_length: 32
  warmup_steps: 2
  save_interval: 10
  log_interval: 1
inference: {{prompts: ["def "], max_new_tokens: 8}}
"""
# srun starts the one rank: without torchrun an attempt trains a few seconds earlier.
CLUSTER = """\
scheduler: slurm
launcher: srun
python: {python}
host_python: {python}
cpus_per_task: 1
signal_lead: 60
sbatch: {{mem: 500M}}
"""
COMMANDS = (
    "sbatch", "scontrol", "squeue", "scancel", "sinfo", "sacct", "sacctmgr", "sattach", "sbcast", "sdiag", "sprio",
    "sreport", "sshare", "sstat", "strigger", "salloc",
)  # fmt: skip
LIVE = ("PENDING", "RUNNING", "COMPLETING", "SUSPENDED", "CONFIGURING", "STOPPED", "REQUEUED", "REQUEUE_HOLD")
TAKE_OVERS = ("take over", "lost", "superseded")


@dataclass(frozen=True)
class QueuedJob:
    """One line of squeue."""

    job_id: str
    state: str
    dependency: str
    name: str
    comment: str
    stage: str

    @property
    def alive(self) -> bool:
        return self.state in LIVE

    @property
    def waits(self) -> bool:
        return self.state == "PENDING"


class DrivenChain(Chain):
    """One Run whose interpreter sources a hook that tests write, so that anything may happen in any process of it."""

    def __init__(
        self, slurm: PrivateSlurm, folder: Path, name: str, *, steps: int = STEPS, data: str = "", cluster: str = ""
    ) -> None:
        super().__init__(slurm, folder, name)
        self.steps, self.stubs = steps, folder / f"{name}.bin"
        self.hook, self.interpreter = folder / f"{name}.hook", folder / f"{name}.python"
        self.hook.write_text("")
        # The product takes SLURM_JOB_ID from what it calls: this one stays.
        known = "if [[ ${SLURM_JOB_ID:-} ]]; then export IN_A_JOB=1; fi"
        self.interpreter.write_text(f'#!/bin/bash\n{known}\nsource "{self.hook}"\nexec {sys.executable} "$@"\n')
        self.interpreter.chmod(0o755)
        data = data or f"{folder}/corpus/*.txt"
        self.config.write_text(CONFIG.format(name=name, folder=folder, data=data, steps=steps))
        self.cluster = folder / f"{name}.site.yaml"
        self.cluster.write_text(CLUSTER.format(python=self.interpreter) + cluster)

    @property
    def environment(self) -> dict[str, str]:
        env = super().environment
        return env | {"PATH": f"{self.stubs}:{env['PATH']}"} if self.stubs.is_dir() else env

    # What a test may do to it

    def on(self, program: str, *lines: str, once: bool = False, job: str = "") -> Path:
        """Have every process that runs `program` do these lines of bash first; return the mark that they leave.

        `program` is matched with the words of the command: a module, or a module and a verb. `job`: only there.
        """
        mark = self.folder / f"{self.run.name}.mark{len(self.hook.read_text().splitlines())}"
        words = program.replace(" ", "\\ ")
        tests = [f'"$*" == *{words}*']
        tests += [f"! -e {mark}"] * once + [f'${{SLURM_JOB_ID:-}} == "{job}"'] * bool(job)
        text = f"if [[ {' && '.join(tests)} ]]; then echo $SLURM_JOB_ID >>{mark}; {'; '.join(lines)}; fi\n"
        with self.hook.open("a") as file:
            file.write(text)
        return mark

    def inject(self, fault: str, job: str = "") -> None:
        self.on(
            "pipeline.stages.pretrain",
            f'PIPELINE_INJECT="${{PIPELINE_INJECT:-}};{fault}"',
            "export PIPELINE_INJECT",
            job=job,
        )

    def slow(self, seconds: float) -> None:
        """Let each step take so many seconds: time for something to happen."""
        self.inject(f"rank=0,step=1,do=slow,seconds={seconds}")

    def submit(self, *overrides: str, slow: float = 0.0) -> None:
        if slow:
            self.slow(slow)
        self.verb("submit", self.config, "--cluster", self.cluster, *overrides)

    def exit_in_the_middle(self) -> Path:
        """Let the next pretrain script that has begun end by an error of its own; return the mark that it leaves."""
        mark = self.folder / f"{self.run.name}.exit{time.monotonic_ns()}"
        test = f'[[ $BASH_COMMAND == "step pretrain"* && ! -e {mark} ]]'
        with self.run.launch("pretrain").open("a") as file:
            file.write(f"trap 'if {test}; then touch {mark}; exit 9; fi' DEBUG\n")
        return mark

    def stub(self, name: str, text: str) -> Path:
        """Put a command of ours before Slurm's own one inside Jobs; return the file with the calls that it saw."""
        self.stubs.mkdir(exist_ok=True)
        real, mark = shutil.which(name, path=self.slurm.env["PATH"]), self.stubs / f"{name}.calls"
        script = f'#!/bin/bash\nreal={real}\nif [[ ${{SLURM_JOB_ID:-}}${{IN_A_JOB:-}} ]]; then\n    echo "$*" >>{mark}\n{text}\nfi\nexec $real "$@"\n'
        (self.stubs / name).write_text(script)
        (self.stubs / name).chmod(0o755)
        return mark

    @contextmanager
    def nodes_are_busy(self) -> Iterator[None]:
        """Keep all nodes busy meanwhile: what is submitted waits."""
        blocker = self.slurm.submit("sleep 600", f"--nodes={len(self.slurm.nodes)}", "--exclusive", "--time=20")
        self.slurm.wait_for(blocker, "RUNNING")
        try:
            yield
        finally:
            self.slurm.run("scancel", blocker)

    def pids(self, *words: str) -> list[int]:
        """List the processes on the nodes whose command line holds the Run's folder, or its script, and all words."""
        found = []
        for node in self.slurm.nodes:
            for pid in self.slurm.pids_on(node):
                with suppress(OSError):
                    line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    named = f"{self.run.root} " in f"{line} " or f"{self.run.root}/" in line
                    if named and all(word in line for word in words):
                        found.append(pid)
        return found

    def script_pid(self, job: str) -> int:
        """Return the batch script of a running Job: bash with the copy that slurmd has made of it."""
        return next(pid for pid in self.pids("slurm_script") if f"SLURM_JOB_ID={job}".encode() in variables_of(pid))

    def rank_pid(self) -> int:
        return self.pids("-m pipeline.stages.pretrain", sys.executable)[0]

    def warn(self, job: str) -> None:
        """Play the time limit that comes near: the signal that Slurm sends the script then."""
        self.slurm.run("scancel", "--signal=USR2", "--batch", job)

    def warn_without_controller(self, job: str) -> None:
        os.kill(self.script_pid(job), signal.SIGUSR2)

    def kill(self, job: str) -> None:
        """End an attempt of pretrain so that no process of it can say or do anything more."""
        script = self.script_pid(job)
        for pid in [script, *self.pids("pipeline.stages.pretrain")]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def controller_away(self, seconds: float) -> None:
        """Bring the controller back `seconds` after it went."""
        time.sleep(seconds)
        self.slurm.start_controller()

    def sbatch_by_hand(self, *flags: str) -> str:
        """Do what a person may: start a pretrain script of the Run beside the chain."""
        script = self.run.snapshot / "sbatch" / "pretrain.sbatch"
        words = ["sbatch", "--parsable", "--time=10", *flags, str(script), str(self.run.root)]
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=60, check=True)
        return done.stdout.strip()

    # What can be seen

    @property
    def token(self) -> str:
        """What the comments of all Jobs of this Run begin with."""
        return f"pipeline:{read_json(self.run.record)['id']}:"

    def queue(self, stage: str = "") -> list[QueuedJob]:
        """List the Run's Jobs that squeue knows, ended ones too, oldest first."""
        words = ["squeue", "--noheader", "--all", "--states=all", "--format=%A|%T|%E|%j|%k"]
        jobs = []
        for line in self.ask(*words).splitlines():
            job_id, state, dependency, name, comment = line.split("|", 4)
            if comment.startswith(self.token):
                found = re.match(r"-([a-z]+)", name.removeprefix(self.run.name))
                jobs.append(QueuedJob(job_id, state, dependency, name, comment, found[1] if found else ""))
        return sorted((job for job in jobs if stage in ("", job.stage)), key=lambda job: int(job.job_id))

    def ask(self, *words: str) -> str:
        """Return what a command of Slurm's says; again where a busy machine has let it wait in vain."""
        for _ in range(3):
            with suppress(SlurmError):
                return self.slurm.run(*words).stdout
            time.sleep(2)
        return self.slurm.run(*words).stdout

    def alive(self, stage: str = "") -> list[QueuedJob]:
        return [job for job in self.queue(stage) if job.alive]

    def running(self, stage: str = "pretrain") -> str:
        """Wait for a running Job of a Stage and return its id."""
        found: list[str] = []

        def look() -> list[str]:
            found[:] = [job.job_id for job in self.queue(stage) if job.state == "RUNNING"]
            return found

        self.wait_for(f"a running Job of {stage}", look, 90)
        return found[0]

    def waiting(self, stage: str = "pretrain") -> str:
        """Wait for a Job of a Stage that waits and return its id."""
        found: list[str] = []

        def look() -> list[str]:
            found[:] = [job.job_id for job in self.queue(stage) if job.waits]
            return found

        self.wait_for(f"a waiting Job of {stage}", look, 60)
        return found[0]

    def job(self, stage: str, segment: int = 0) -> str:
        return self.queue(stage)[max(0, segment - 1)].job_id

    def state_of(self, job: str) -> str:
        return self.slurm.job(job)["JobState"]

    def step(self) -> int:
        return max((int(row["step"]) for row in read_lines(self.run.metrics)), default=0)

    def training(self) -> list[tuple[str, int]]:
        """List the attempts that have begun to train, oldest first."""
        return [(str(e["job_id"]), int(e["attempt"])) for e in self.events("start") if e.get("stage") == "pretrain"]

    def take_overs(self, *allowed: tuple[str, int]) -> list[Record]:
        """List the events by which attempts say that they have taken the Run from another one, or lost it."""
        events = [event for kind in TAKE_OVERS for event in self.events(kind)]
        return [event for event in events if (str(event.get("job_id")), event.get("attempt")) not in allowed]

    def samples(self) -> list[int]:
        """List the steps of which samples were drawn or Scores made, but for 0, the model before training."""
        files = [*self.run.root.glob("samples/step-*.jsonl"), *self.run.root.glob("scores/step-*/*.json")]
        return sorted({int(found[1]) for path in files if (found := re.search(r"step-(\d+)", str(path)))} - {0})

    def is_complete(self) -> bool:
        score = self.run.scores(self.steps) / "bits_per_byte.json"
        return score.is_file() and self.run.samples(self.steps).is_file()

    def finish(self, timeout: float = 150) -> None:
        """Wait until the chain is complete by itself; fail at once where nothing of it is queued any more."""
        idle = 0

        def done() -> bool:
            nonlocal idle
            if self.is_complete():
                return True
            try:
                idle = 0 if self.alive() else idle + 1
            except SlurmError:  # the controller is away
                idle = 0
            assert idle < 5, f"nothing is queued, and the chain is not complete\n{self.logs()}"
            return False

        self.wait_for("a complete chain", done, timeout, 1.0)
        self.wait_for("an empty queue", lambda: not self.alive(), 60, 0.5)
        assert self.status()["state"] == "completed"

    def result(self) -> dict[str, object]:
        """Return what two Runs of the same config must agree in: weights and optimizer, losses, score, sample."""
        manifest = read_json(self.run.checkpoint(self.steps) / "manifest.json")
        return {
            "weights": {name: file["sha256"] for name, file in manifest["files"].items() if name.endswith(".bin")},
            "losses": [(row["step"], row["loss"]) for row in read_lines(self.run.metrics)],
            "score": read_json(self.run.scores(self.steps) / "bits_per_byte.json")["score"],
            "sample": [row["completion"] for row in read_lines(self.run.samples(self.steps))],
        }


def write_corpus(folder: Path, documents: int = 40) -> None:
    """Write small files of words, always the same."""
    words = "def return import self value for in range if not None open print read write close list dict".split()
    chance = random.Random(0)
    folder.mkdir(parents=True)
    for number in range(documents):
        lines = [" ".join(chance.choices(words, k=6)) for _ in range(40)]
        (folder / f"{number:03}.txt").write_text("\n    ".join(lines) + "\n")


def variables_of(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def make_twin(
    slurm: PrivateSlurm, folder: Path, name: str = "undisturbed", *, steps: int = STEPS, overrides: tuple[str, ...] = ()
) -> DrivenChain:
    """Run the same config to its end where nothing disturbs it: on this machine, without Slurm."""
    chain = DrivenChain(slurm, folder, name, steps=steps)
    done = subprocess.run(
        chain.command("submit", chain.config, "--cluster", "local", *overrides),
        env=chain.environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return chain


__all__ = ["COMMANDS", "STEPS", "DrivenChain", "make_twin", "write_corpus"]
