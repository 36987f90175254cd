"""`submit` at every moment of a chain: no Job that could start while another of its Stage lives, and none missing."""

from __future__ import annotations

import itertools
import os
import pwd
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest

from pipeline.cluster.schema import Cluster
from pipeline.config.schema import Config
from pipeline.files import write_json
from pipeline.plan.jobs import Plan, make_plan
from pipeline.run import job_ledger
from pipeline.run.attempts import AttemptRecords
from pipeline.run.folder import Run
from pipeline.run.records import JobRecord
from pipeline.slurm.errors import SlurmError
from pipeline.slurm.jobs import SlurmJob
from pipeline.slurm.states import ENDED
from pipeline.submit.missing import not_submitted
from pipeline.submit.queue import QueuedJob
from pipeline.submit.to_slurm import Submission

ME = pwd.getpwuid(os.getuid()).pw_name
ID = "0123456789ab"
STATIC = 3  # Segments that are queued beforehand where nodes may not submit


class MemorySlurm:
    """The queue in memory, with Slurm's rules for edges; nothing runs by itself."""

    def __init__(self) -> None:
        self.jobs: dict[str, SlurmJob] = {}
        self.next = 101
        self.fails_after: int | None = None  # submissions that are still answered

    def carrying(self, names: object) -> MemorySlurm:
        return self

    def add(self, name: str, token: str, state: str, dependency: str = "") -> str:
        job_id, self.next = str(self.next), self.next + 1
        self.jobs[job_id] = SlurmJob(
            job_id, state, "squeue", "Priority" if state == "pending" else "None", comment=token, user=ME, name=name,
            dependency=dependency,
        )  # fmt: skip
        return job_id

    def of_run(self, run_id: str, users: object) -> list[SlurmJob]:
        return [job for job in self.jobs.values() if job.comment.startswith(f"pipeline:{run_id}:")]

    def submit(self, flags: Sequence[str], script: str, args: Sequence[str], token: str) -> str:
        if self.fails_after == 0:
            raise SlurmError(["sbatch"], "Socket timed out on send/recv operation")
        self.fails_after = None if self.fails_after is None else self.fails_after - 1
        options = dict(word.removeprefix("--").partition("=")[::2] for word in flags)
        edges = options.get("dependency", "")
        for parent in parents(edges):
            assert parent in self.jobs, f"{edges}: Slurm has forgotten it, and refuses"
        return self.add(options["job-name"], token, "pending", edges)

    def update(self, job_id: str, Dependency: str = "", **others: str) -> None:
        job = self.jobs[job_id]
        assert job.state == "pending"
        assert job_id not in parents(Dependency), "a Job that waits for itself"
        self.jobs[job_id] = SlurmJob(**(vars(job) | {"dependency": Dependency}))
        assert not self.waits_for(job_id, job_id), "a circle"

    def cancel(self, ids: Sequence[str]) -> None:
        for job_id in ids:
            self.jobs[job_id] = SlurmJob(**(vars(self.jobs[job_id]) | {"state": "cancelled"}))

    def waits_for(self, job_id: str, other: str) -> bool:
        """Tell whether a Job cannot start while the other lives: by an edge of its own, or by singleton.

        Not by way of a third: when that one is cancelled, an edge to it no longer holds anything.
        """
        job, edges = self.jobs[job_id], self.jobs[job_id].dependency.split(",")
        same = self.jobs[other].name == job.name and int(other) < int(job_id)
        return other in parents(job.dependency) or ("singleton" in edges and same)

    def living(self, kind: str = "") -> list[str]:
        alive = (job for job in self.jobs.values() if job.state not in ENDED)
        return [job.job_id for job in alive if f":{kind}" in job.comment]

    def config(self) -> dict[str, str]:
        return {}


def parents(dependency: str) -> list[str]:
    return [edge.split(":")[1] for edge in dependency.split(",") if ":" in edge]


class MemoryLedger:
    """The Job ledger in memory: what it is on disk has tests of its own, and there are thousands of moments."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.records: dict[int, JobRecord] = {}
        for name in ("reserve", "keep", "drop", "read_ledger"):
            monkeypatch.setattr(job_ledger, name, getattr(self, name))
        monkeypatch.setattr("pipeline.submit.missing.read_ledger", self.read_ledger)
        monkeypatch.setattr(job_ledger, "run_id", lambda run: ID)

    def reserve(self, run: Run, **about: Any) -> JobRecord:
        number = len(self.records) + 1
        record = JobRecord(number=number, user=ME, submitted=time.time(), **about)
        return self.keep(run, record.but(token=f"pipeline:{ID}:{record.kind}.{number:06d}"))

    def keep(self, run: Run, record: JobRecord) -> JobRecord:
        self.records[record.number] = record
        return record

    def drop(self, run: Run, record: JobRecord) -> None:
        del self.records[record.number]

    def read_ledger(self, run: Run) -> list[JobRecord]:
        return list(self.records.values())


class Moment(NamedTuple):
    """A chain that was stopped in the middle, as it may be found."""

    tokenize: str  # the state of each Job: squeue's word, purged (squeue has forgotten it), or absent: never submitted
    tokenized: bool
    segments: tuple[str, ...]
    trained: bool
    evaluate: str
    inference: str
    unheard: bool = False  # sbatch's answer to the last submission was lost, and its caller died

    def __str__(self) -> str:
        parts = [self.tokenize, "+".join(self.segments) or "none", self.evaluate, self.inference]
        return "-".join([*parts, *(name for name in ("tokenized", "trained", "unheard") if getattr(self, name))])


RUNNING = ("running", "completing")
TOKENS = (  # the Job and its output before a Segment has begun
    ("absent", False), ("absent", True), ("pending", False), ("running", False), ("failed", False),
    ("cancelled", False), ("completed", True), ("purged", False),
)  # fmt: skip
FOLLOWERS = (
    ("absent", "absent"), ("pending", "absent"), ("pending", "pending"), ("running", "cancelled"),
    ("purged", "pending"),
)  # fmt: skip


def chains() -> Iterator[tuple[str, ...]]:
    """Yield the Segments of a chain at every moment: those that ended, one that works or waits, its successors."""
    ends = itertools.cycle(("completed", "failed", "preempted", "purged", "node_fail"))
    for past in range(3):
        ended = tuple(next(ends) for _ in range(past))
        for rest in ((), ("pending",), ("pending", "pending"), ("cancelled",), ("timeout",), ("requeued",)):
            yield ended + rest
        for now in RUNNING:
            for behind in ((), ("pending",), ("cancelled",), ("pending", "pending"), ("cancelled", "pending")):
                yield (*ended, now, *behind)


def moments() -> Iterator[Moment]:
    for segments in chains():
        begun = any(state not in ("pending", "cancelled") for state in segments)
        tokens = (("completed", True), ("purged", True)) if begun else TOKENS
        for (tokenize, tokenized), trained in itertools.product(tokens, (False, True) if begun else (False,)):
            for evaluate, inference in FOLLOWERS:
                moment = Moment(tokenize, tokenized, segments, trained, evaluate, inference)
                yield moment
                if inference == "pending" or (segments[-1:] == ("pending",) and evaluate == "absent"):
                    yield moment._replace(unheard=True)  # the one that was submitted last


class Site(NamedTuple):
    """What all Runs of a kind of cluster share."""

    config: Config
    cluster: Cluster
    plan: Plan

    @classmethod
    def of(cls, run: Run, *, may_submit: bool, kill: bool) -> Site:
        pretrain = {} if may_submit else {"segments": STATIC}
        config = Config.model_validate({"name": run.name, "pretrain": pretrain})
        cluster = Cluster(scheduler="slurm", nodes_may_submit=may_submit, kill_on_invalid_dep=kill)
        plan = make_plan(config, cluster, run)
        write_json(run.record, {"id": ID})
        write_json(run.plan, plan.to_json())
        return cls(config, cluster, plan)


class Chain:
    """The Run of one moment, and what `submit` makes of it."""

    def __init__(self, run: Run, site: Site, ledger: MemoryLedger) -> None:
        self.run, self.slurm, self.ledger = run, MemorySlurm(), ledger
        self.config, self.cluster, self.plan = site
        self.complete: set[str] = set()
        self.begun: list[str] = []  # Jobs that have worked
        ledger.records.clear()

    def at(self, moment: Moment) -> None:
        """Bring the queue, the ledger and the outputs to a moment."""
        flags = {"tokenize": moment.tokenized, "pretrain": moment.trained}
        self.complete |= {stage for stage, done in flags.items() if done}
        token = self.add("tokenize", moment.tokenize)
        last, edge = "", f"afterok:{token},singleton" if token else "singleton"
        for number, state in enumerate(moment.segments, 1):
            last = self.add("pretrain", state, edge, 0 if self.cluster.nodes_may_submit else number)
            edge = f"afterany:{last},singleton"
        for stage, state in (("evaluate", moment.evaluate), ("inference", moment.inference)):
            self.add(stage, state, f"afterany:{last}" if last else "")
        if moment.unheard:
            job_ledger.keep(self.run, job_ledger.read_ledger(self.run)[-1].but(job_id=None))

    def add(self, stage: str, state: str, dependency: str = "", segment: int = 0) -> str:
        if state == "absent":
            return ""
        name = f"{self.run.name}-{stage}-{ID}"
        record = job_ledger.reserve(self.run, stage=stage, name=name, dependency=dependency, segment=segment, since=1.0)
        job_id = self.slurm.add(name, record.token, state, dependency)
        job_ledger.keep(self.run, record.but(job_id=job_id))
        if stage == "pretrain" and state not in ("pending", "cancelled"):
            self.begun.append(job_id)
        if state == "purged":
            del self.slurm.jobs[job_id]
        return job_id

    def submit(self) -> list[str]:
        """Submit; return the ids of the Jobs that were added."""
        before = set(self.slurm.jobs)
        submission = Submission(self.run, self.config, self.cluster, self.plan, self.slurm)  # type: ignore[arg-type]
        submission.submit(lambda text: None)
        return [job_id for job_id in self.slurm.jobs if job_id not in before]

    def alive(self) -> list[QueuedJob]:
        queue = Submission(self.run, self.config, self.cluster, self.plan, self.slurm).queue  # type: ignore[arg-type]
        return queue.alive()

    def missing(self) -> list[str]:
        return not_submitted(self.run, self.config, self.cluster, self.alive())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(tmp_path_factory.mktemp("property") / "micro")
    run.root.mkdir()
    return run


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> MemoryLedger:
    return MemoryLedger(monkeypatch)


def believe(monkeypatch: pytest.MonkeyPatch, chain: Chain) -> None:
    """Let what is complete, and which Jobs have worked, be what the moment says."""
    for module in ("to_slurm", "missing"):
        monkeypatch.setattr(f"pipeline.submit.{module}.is_complete", lambda run, config, stage: stage in chain.complete)
    worked = [AttemptRecords(job_id, 0, None, None) for job_id in chain.begun]
    monkeypatch.setattr("pipeline.submit.missing.all_attempts", lambda run, stage: worked)


def check(chain: Chain, moment: Moment, added: list[str]) -> None:
    slurm = chain.slurm
    for job_id in added:
        stage = slurm.jobs[job_id].comment.split(":")[2].split(".")[0]
        for other in slurm.living(stage):
            if other != job_id:
                assert slurm.waits_for(job_id, other) or slurm.waits_for(other, job_id), f"{stage} could run twice"
        assert stage not in chain.complete, f"{stage} is complete"
    assert "tokenize" in chain.complete or len(slurm.living("tokenize")) == 1
    check_segments(chain, moment)
    for stage in ("evaluate", "inference"):
        assert len(slurm.living(stage)) == 1


def check_segments(chain: Chain, moment: Moment) -> None:
    """One works and one waits, or as many as are queued beforehand; the rest of the chain waits for the last."""
    slurm, segments = chain.slurm, chain.slurm.living("pretrain")
    if "pretrain" in chain.complete:
        return
    waiting = [job_id for job_id in segments if slurm.jobs[job_id].state in ("pending", "requeued")]
    if chain.cluster.nodes_may_submit:
        working = [job_id for job_id in segments if job_id not in waiting]
        assert len(waiting) == 1
        assert all(slurm.waits_for(waiting[0], job_id) for job_id in working)
        if working:  # however the one that works ends, and whatever id a requeued one has
            assert slurm.jobs[waiting[0]].dependency == f"afterany:{working[-1]},singleton"
    else:
        begun = sum(state not in ("pending", "requeued", "cancelled") for state in moment.segments)
        alive = any(state in (*RUNNING, "pending", "requeued") for state in moment.segments)
        assert len(waiting) >= STATIC - (begun if alive else 0)
    last = max(segments, key=int)
    for stage in ("evaluate", "inference"):
        for job_id in slurm.living(stage):
            if slurm.jobs[job_id].state == "pending":
                assert slurm.jobs[job_id].dependency == f"afterany:{last}"
    if "tokenize" not in chain.complete and moment.tokenize in ("absent", "failed", "cancelled"):
        first = min(waiting, key=int)
        assert f"afterok:{slurm.living('tokenize')[0]}" in slurm.jobs[first].dependency


SITES = tuple(itertools.product((True, False), (True, False)))  # nodes may submit, kill_on_invalid_dep


@pytest.mark.parametrize("at", range(len(SITES)), ids=["rolling", "rolling-no-kill", "static", "static-no-kill"])
def test_submit_at_every_moment_of_a_chain(
    run: Run, ledger: MemoryLedger, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    may_submit, kill = SITES[at]
    site = Site.of(run, may_submit=may_submit, kill=kill)
    found = list(moments())
    # All on the cluster that most have; of the others each moment has its turn on one.
    chosen = found if at == 0 else [moment for number, moment in enumerate(found) if number % 3 == at - 1]
    assert len(chosen) > 300
    for moment in chosen:
        chain = Chain(run, site, ledger)
        chain.at(moment)
        believe(monkeypatch, chain)
        try:
            check(chain, moment, chain.submit())
            assert chain.missing() == []
            queue = dict(chain.slurm.jobs)
            assert chain.submit() == [], "a second call submits nothing"
            assert chain.slurm.jobs == queue, "a second call changes nothing"
        except AssertionError as error:
            raise AssertionError(f"{moment}: {error}\n" + "\n".join(map(str, chain.slurm.jobs.values()))) from error
