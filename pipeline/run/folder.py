"""A Run is a folder; this class knows every path in it."""

from __future__ import annotations

import re
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import UserError
from pipeline.files import append_line, read_json
from pipeline.run.steps import list_steps, step_name


@dataclass(frozen=True)
class Run:
    """The files of one Run. Nothing else in the package spells a path inside it."""

    root: Path

    @classmethod
    def open(cls, path: Path) -> Run:
        """Return the Run at `path`, or say that there is none."""
        root = path.expanduser().absolute()
        run = cls(root.resolve() if ".." in root.parts else root)  # a link may be the name that all nodes know
        if not run.config.is_file():
            raise UserError(f"{path}: no Run here (no config.yaml in it). Runs are made by: nox -s pretrain")
        return run

    @property
    def name(self) -> str:
        return self.root.name

    # what the user wants and what was planned
    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def plan(self) -> Path:
        return self.root / "plan.json"

    @property
    def cluster(self) -> Path:
        """The cluster that the Run was planned for, as it was then."""
        return self.root / "cluster.yaml"

    @property
    def jobs(self) -> Path:
        """jobs.json: the Jobs of this machine's scheduler; of a Run made by version 0.1.0 also those at Slurm."""
        return self.root / "jobs.json"

    @property
    def record(self) -> Path:
        """run.json: commit, versions, seed, threads: what a twin of this Run would need."""
        return self.root / "run.json"

    @property
    def snapshot(self) -> Path:
        return self.root / "snapshot"

    def launch(self, stage: str) -> Path:
        return self.root / "launch" / f"{stage}.env"

    # tokens
    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def tokenizer(self) -> Path:
        return self.data / "tokenizer.model"

    @property
    def pieces(self) -> Path:
        """Where the pieces that the input is cut into are listed."""
        return self.data / "pieces.json"

    def piece(self, number: int) -> Path:
        """Where a piece lies that is encoded; there once it is whole, gone when the index is there.

        Beside the pieces lie the records of finished shards, for as long.
        """
        return self.data / "pieces" / f"{number:05d}"

    @property
    def index(self) -> Path:
        return self.data / "index.json"

    @property
    def verified(self) -> Path:
        """Which shards were found to be what the index says, and what their files looked like then."""
        return self.control / "verified.json"

    @property
    def inputs(self) -> Path:
        """Which files the tokens were made of, and their hashes."""
        return self.data / "inputs.json"

    @property
    def inputs_seen(self) -> Path:
        """Which of them have another time by now and the same bytes."""
        return self.control / "inputs.json"

    @property
    def keep_tokens(self) -> Path:
        """A person's wish to go on with the tokens, although the text has changed since."""
        return self.control / "keep-tokens"

    # training
    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / step_name(step)

    def checkpoint_steps(self) -> list[int]:
        """List the steps that have a whole checkpoint (its manifest is written last), ascending."""
        return list_steps(self.checkpoints)

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def compile_cache(self) -> Path:
        """What torch.compile has made, so that the next attempt need not."""
        return self.root / "cache" / "inductor"

    @property
    def sinks(self) -> Path:
        """Hold what TensorBoard and W&B read."""
        return self.root / "sinks"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    # results
    def scores(self, step: int) -> Path:
        return self.root / "scores" / step_name(step)

    def score(self, step: int, benchmark: str) -> Path:
        """The Score of one Benchmark, when all of its Units are there."""
        return self.scores(step) / f"{benchmark}.json"

    def slices(self, step: int, benchmark: str) -> Path:
        """The folder of a Benchmark's Units: how it is cut, results, claims."""
        return self.scores(step) / f"{benchmark}.d"

    @property
    def released(self) -> Path:
        """Which checkpoint is the released one, as the last line of `releases` says."""
        return self.root / "released.json"

    @property
    def releases(self) -> Path:
        """Who moved it, when and why, one line each."""
        return self.root / "releases.jsonl"

    @property
    def evaluations(self) -> Path:
        """Where version 0.1.0 kept the records of evaluate Jobs beside those of the chain."""
        return self.root / "evaluations"

    @property
    def score_table(self) -> Path:
        return self.root / "scores.csv"

    @property
    def compressors(self) -> Path:
        """Bits per byte of gzip, bzip2 and xz on the validation text; no step, so beside them."""
        return self.root / "scores" / "compressors.json"

    def samples(self, step: int) -> Path:
        return self.root / "samples" / f"{step_name(step)}.jsonl"

    def samples_record(self, step: int) -> Path:
        """What the samples of a step were made with, and how fast."""
        return self.root / "samples" / f"{step_name(step)}.json"

    def samples_begun(self, step: int) -> Path:
        """The samples that an attempt has finished so far, in the order in which they ended."""
        return self.root / "samples" / f"{step_name(step)}.begun.jsonl"

    @property
    def export(self) -> Path:
        """A checkpoint in Hugging Face's form."""
        return self.root / "export"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    # Jobs at Slurm
    @property
    def job_records(self) -> Path:
        """The folder of the Job ledger: a file for each Job at Slurm, numbered in the order of submission."""
        return self.root / "jobs"

    def job_record(self, number: int) -> Path:
        return self.job_records / f"{number:06d}.json"

    # attempts, control, logs
    @property
    def attempts(self) -> Path:
        return self.root / "attempts"

    def attempt(self, job_id: str, attempt: int) -> Path:
        """The folder of one attempt; whoever looks for a file in it finds none before the attempt has begun."""
        return self.attempts / f"{job_id}.{attempt}"

    def beginning(self, job_id: str, attempt: int) -> Path:
        """What the host knew when an attempt began: nodes, newest step, limits."""
        return self.attempt(job_id, attempt) / "begin.json"

    def said(self, job_id: str, attempt: int) -> Path:
        """What a rank said of the attempt's end; the host makes the verdict of it."""
        return self.attempt(job_id, attempt) / "said.json"

    def verdict(self, job_id: str, attempt: int) -> Path:
        """How an attempt ended, written by its own host, or by the attempt that took the Run over."""
        return self.attempt(job_id, attempt) / "verdict.json"

    def allocation(self, job_id: str, attempt: int) -> Path:
        """What the batch shell sources about its nodes: PIPELINE_NODES."""
        return self.attempt(job_id, attempt) / "allocation.env"

    def preflight(self, job_id: str, attempt: int) -> Path:
        """Where preflight reports on the nodes of an attempt."""
        return self.attempt(job_id, attempt) / "preflight.json"

    def preflight_records(self, job_id: str, attempt: int) -> Path:
        """The folder in which the nodes of an attempt tell of themselves; gone when the report is written."""
        return self.attempt(job_id, attempt) / "preflight"

    def sinfo(self, job_id: str, attempt: int) -> Path:
        """What Slurm has registered for the attempt's nodes, as `sinfo -o "%20N %10c %10m %25f %G"` prints it."""
        return self.attempt(job_id, attempt) / "sinfo"

    def ledger(self, job_id: str, attempt: int) -> Path:
        """Where an attempt of pretrain writes what its time went into."""
        return self.attempt(job_id, attempt) / "time.json"

    @property
    def control(self) -> Path:
        return self.root / "control"

    @property
    def owner(self) -> Path:
        """Who may write tokens and checkpoints; see pipeline/run/owner.py."""
        return self.control / "owner.json"

    def owner_of(self, stage: str, job_id: str = "") -> Path:
        """Who may write a Stage's outputs. Those that only read checkpoints may run beside training.

        Each task of a Job array (its id ends with _NUMBER) has a place of its own: they write different pieces.
        """
        if stage == "tokenize" and (task := re.fullmatch(r"[0-9]+_([0-9]+)", job_id)):
            return self.control / f"owner.tokenize-{task[1]}.json"
        return self.control / f"owner.{stage}.json" if stage in ("preflight", "evaluate", "inference") else self.owner

    @property
    def save(self) -> Path:
        """A person's wish for a checkpoint now; removed when it is there."""
        return self.control / "save"

    @property
    def anew(self) -> Path:
        """A person's wish that training begins again at step 0; removed when it has begun."""
        return self.control / "begin-anew"

    @property
    def stop(self) -> Path:
        """A person's wish to end the chain; only `resume` removes it."""
        return self.control / "stop"

    def warned(self, job_id: str, attempt: int) -> Path:
        """The batch shell's word to one attempt that its time is nearly up."""
        return self.control / f"warned.{job_id}.{attempt}"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def log(self, stage: str, job_id: str, attempt: int) -> Path:
        return self.logs / f"{stage}-{job_id}.{attempt}.log"

    def inherited(self, run_id: str) -> Path:
        """What a copy has set aside of the Run that it was made of: Jobs, attempts and leases that are not its own."""
        return self.root / "inherited" / run_id

    def bound_to_jobs(self) -> list[Path]:
        """List what means nothing but to the Jobs and processes of this very folder."""
        leases_and_wishes = [path for path in self.control.glob("*") if path != self.keep_tokens]
        return [self.jobs, self.job_records, self.evaluations, self.attempts, *leases_and_wishes]

    def event(self, kind: str, **details: Any) -> None:
        """Append one line to events.jsonl: {"time", "event", "host", ...details}."""
        append_line(self.events, {"time": time.time(), "event": kind, "host": socket.gethostname(), **details})

    def read_index(self) -> dict[str, Any] | None:
        """Return data/index.json, or None before tokenize is complete."""
        value = read_json(self.index)
        return value if isinstance(value, dict) else None
