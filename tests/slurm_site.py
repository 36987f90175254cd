"""A cluster file, a config, a small Slurm on PATH and the product's command line on them: what Slurm tests share."""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

import fake_slurm
import pytest
from conftest import pipeline_in
from micro import MICRO, environment

from pipeline.files import read_json, write_json, write_text
from pipeline.host import jobscript
from pipeline.run.folder import Run
from pipeline.run.verdict import write_said

Pipeline = Callable[..., subprocess.CompletedProcess[str]]

CLUSTER = """\
scheduler: slurm
gpus_per_node: 8
gpu_type: h100
sbatch: {partition: gpu, account: lm}
stages: {tokenize: {sbatch: {partition: cpu}}}
"""
NO_SUBMIT = CLUSTER + "nodes_may_submit: false\n"  # Segments are then queued beforehand


class Site:
    """A cluster file, a config, the fake Slurm, and the product's command line on them."""

    def __init__(self, tmp_path: Path, micro: Path, pipeline: Pipeline) -> None:
        self.folder = tmp_path / "slurm"
        self.changes = fake_slurm.install(self.folder)
        self.cluster = tmp_path / "ours.yaml"
        self.cluster.write_text(CLUSTER)
        self.micro, self.pipeline, self.run = micro, pipeline, Run(tmp_path / "runs" / "micro")

    def submit(self, *words: str, **changes: str) -> subprocess.CompletedProcess[str]:
        return self.pipeline(
            "submit", self.micro, "--cluster", self.cluster, *words, **(self.changes | changes)
        )  # fmt: skip

    def verb(self, *words: object) -> subprocess.CompletedProcess[str]:
        return self.pipeline(*words, **self.changes)

    def tokenized(self) -> None:
        """Let tokenize have ended well, with tokens of no use."""
        self.set("tokenize", "COMPLETED")
        write_text(self.run.tokenizer, "no real model")
        write_json(self.run.index, {"tokenizer": {"vocab_size": 400}})

    @property
    def queue(self) -> dict[str, dict]:
        return fake_slurm.read(self.folder)

    @property
    def id(self) -> str:
        return str((read_json(self.run.record) or {}).get("id"))

    def kind(self, job: dict) -> str:
        """Return what a Job's name says beside the Run's name and id."""
        return str(job["name"]).removeprefix("micro-").removesuffix(f"-{self.id}")

    def by_name(self) -> dict[str, dict]:
        """Return the last Job of each kind."""
        return {self.kind(job): job | {"id": job_id} for job_id, job in self.queue.items()}

    def ids(self, kind: str) -> list[str]:
        """List the Jobs of one kind in the order of submission."""
        return [job_id for job_id, job in self.queue.items() if self.kind(job) == kind]

    def states(self, kind: str) -> list[str]:
        return [self.queue[job_id]["state"] for job_id in self.ids(kind)]

    def set(self, name: str, state: str, **changes: object) -> None:
        self.set_id(self.by_name()[name]["id"], state, **changes)

    def set_id(self, job_id: str, state: str, **changes: object) -> None:
        fake_slurm.set_state(self.folder, job_id, state, **changes)

    def calls(self, *commands: str) -> list[str]:
        """List the calls of Slurm's commands so far, or of these."""
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if not commands or line.split()[0] in commands]

    def says(self, command: str, answer: str | None) -> None:
        """Let a command of Slurm's give this answer; None: its own again."""
        path = self.folder / f"{command}.answer"
        path.unlink(missing_ok=True) if answer is None else path.write_text(answer)

    def refuses(self, text: str | None) -> None:
        """Let sbatch take no Job, and say this; None: it takes them again."""
        path = self.folder / "refuse"
        path.unlink(missing_ok=True) if text is None else path.write_text(text)


class KeptSite(Site):
    """One whose chain is submitted once, and put back for each test: its paths stay the same."""

    def __init__(self, folder: Path, corpus: Path, cluster: str = CLUSTER, *words: str) -> None:
        micro = folder / "micro.yaml"
        micro.write_text(MICRO.format(runs=folder / "runs", corpus=corpus), encoding="utf-8")
        super().__init__(folder, micro, pipeline_in(folder))
        self.cluster.write_text(cluster)
        done = self.submit(*words)
        assert done.returncode == 0, done.stderr
        self.tokenized()
        self.places = {path: folder / f"{path.name}.kept" for path in (self.folder, self.run.root.parent)}
        for path, kept in self.places.items():
            shutil.copytree(path, kept)

    def restore(self) -> Site:
        for path, kept in self.places.items():
            shutil.rmtree(path)
            shutil.copytree(kept, path)
        # The Run's folder is another one by its inode.
        record = read_json(self.run.record) | {"inode": self.run.root.stat().st_ino}
        write_json(self.run.record, record)
        return self


class Clock:
    """Time in which sleeping takes none: it moves on all the same."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.slept = 0.0
        now, monotonic, self._really = time.time, time.monotonic, time.sleep
        monkeypatch.setattr(time, "sleep", self.sleep)
        monkeypatch.setattr(time, "time", lambda: now() + self.slept)
        monkeypatch.setattr(time, "monotonic", lambda: monotonic() + self.slept)

    def sleep(self, seconds: float) -> None:
        if seconds < 0.05:  # for a process that is at work, whose time is not this clock's
            self._really(seconds)
        else:
            self.slept += seconds


class Script:
    """The questions of sbatch/lib.sh, asked for one attempt; in this process, so that a test may change what it waits for."""

    def __init__(
        self, site: Site, kind: str = "pretrain", number: int = 0, *, at: int = -1, job_id: str = "", task: str = ""
    ) -> None:
        self.site, self.run, self.number = site, site.run, number
        self.stage = kind if kind in ("pretrain", "evaluate", "inference", "preflight") else "tokenize"
        self.whole = job_id or site.ids(kind)[at]
        self.job_id = f"{self.whole}_{task.partition('/')[0]}" if task else self.whole
        self.part = {"PIPELINE_PHASE": kind, "PIPELINE_TASK": task} if task else {}

    def ask(self, verb: str, *words: object, nodes: str = "n1") -> subprocess.CompletedProcess[str]:
        changes = {"SLURM_JOB_NODELIST": nodes, "SLURM_JOB_ID": self.job_id} | self.part
        stage = [] if verb == "tend" else [self.stage]
        argv = [verb, str(self.run.root), *stage, self.job_id, str(self.number), *map(str, words)]
        out, err, on_term = io.StringIO(), io.StringIO(), signal.getsignal(signal.SIGTERM)
        with patch.dict(os.environ, environment() | self.site.changes | changes, clear=True):
            try:
                with redirect_stdout(out), redirect_stderr(err):
                    code = jobscript.main(argv)
            finally:
                signal.signal(signal.SIGTERM, on_term)
        return subprocess.CompletedProcess(argv, code, out.getvalue(), err.getvalue())

    def begin(self, nodes: str = "n1", **changes: object) -> subprocess.CompletedProcess[str]:
        if self.job_id in self.site.queue:
            self.site.set_id(self.job_id, "RUNNING", nodes=nodes, restarts=self.number, **changes)
        return self.ask("begin", nodes=nodes)

    def end(self, status: int = 0, nodes: str = "n1") -> subprocess.CompletedProcess[str]:
        return self.ask("end", status, "slurm", nodes=nodes)

    def says(self, verdict: str, reason: str = "", nodes: tuple[str, ...] = ()) -> None:
        """Leave what a rank would say."""
        write_said(self.run, self.job_id, self.number, self.stage, verdict, reason, None, nodes=nodes)

    def warned(self, by: str = "USR2") -> Path:
        path = self.run.warned(self.job_id, self.number)
        path.write_text(f"{by}\n")
        return path

    def checkpoint(self, step: int) -> None:
        write_json(self.run.checkpoint(step) / "manifest.json", {"step": step})

    @property
    def verdict(self) -> dict:
        return read_json(self.run.verdict(self.job_id, self.number)) or {}

    @property
    def state(self) -> str:
        return str(self.site.queue[self.job_id]["state"])
