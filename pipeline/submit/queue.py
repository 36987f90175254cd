"""The Run's Jobs at Slurm: the Job ledger joined with the queue; the one place that submits, repoints, cancels.

Whoever asks, a person's `submit` or an attempt on a node, a Job is ours by job id, token and user together. What Slurm
did not answer is not known, and what is not known is taken to be alive.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeline.cluster.schema import Cluster
from pipeline.cluster.secret_env import carried_names
from pipeline.config.schema import Config
from pipeline.plan.flags import Flags, job_flags
from pipeline.run import job_ledger
from pipeline.run.folder import Run
from pipeline.run.records import JobRecord
from pipeline.run.saves import slowest_save
from pipeline.slurm.bad_nodes import bad_nodes_of
from pipeline.slurm.commands import Slurm
from pipeline.slurm.errors import SlurmFull, SlurmRefused
from pipeline.slurm.exclusion import Exclusion, choose_exclusion, with_excluded
from pipeline.slurm.jobs import SlurmJob, unknown
from pipeline.slurm.options import option_words

VOID_SECONDS = 60.0  # after which an attempt's entry without a Job is one of a caller that was killed before sbatch
FOLLOWERS = ("evaluate", "inference")  # Stages of the chain that wait for the newest Segment


@dataclass(frozen=True)
class QueuedJob:
    """An entry of the ledger and what Slurm says of it now."""

    record: JobRecord
    job: SlurmJob

    @property
    def job_id(self) -> str:
        return str(self.record.job_id)

    @property
    def alive(self) -> bool:
        return self.job.alive

    @property
    def waits(self) -> bool:
        """Tell whether it has no nodes now, and may get some."""
        return self.job.alive and self.job.state in ("pending", "requeued", "requeue_hold")

    def is_chain(self, *stages: str) -> bool:
        """Tell whether it is one of the chain's own Jobs, of one of these Stages."""
        return self.record.role == "chain" and self.record.stage in stages


class RunJobs:
    """Looks at the Run's Jobs, and changes those that are there."""

    def __init__(self, run: Run, cluster: Cluster, slurm: Slurm) -> None:
        self.run, self.cluster, self.slurm = run, cluster, slurm
        self.id = job_ledger.run_id(run)

    def look(self, *, keep: bool = True) -> list[QueuedJob]:
        """Return all Jobs of the Run that may be alive or have ended lately, in the order of the ledger: one call.

        What is learned is kept in the ledger, unless not to `keep` it: looking must be possible for everybody.
        SlurmError where the queue cannot be read.
        """
        records = job_ledger.read_ledger(self.run)
        users = {record.user for record in records if record.user} | {job_ledger.this_user()}
        here = self.slurm.of_run(self.id, users if "" not in users else ())
        found: list[QueuedJob] = []
        for record in records:
            if not record.closed:
                found.append(self._match(record, here, {q.job_id for q in found}))
        known = {queued.job_id for queued in found}
        found += [self._unlisted(job, records) for job in here if job.alive and job.job_id not in known]
        return [self._kept(queued, records) for queued in found] if keep else found

    def alive(self) -> list[QueuedJob]:
        """Return those that wait or run, and those of which nothing is known."""
        return [queued for queued in self.look() if queued.alive]

    def _match(self, record: JobRecord, here: Sequence[SlurmJob], taken: Collection[str]) -> QueuedJob:
        """Find the Job of an entry; one that was submitted, and whose id was not heard, gets it now."""
        mine = [job for job in here if self._is(record, job, taken)]
        if mine:
            job = min(mine, key=lambda job: not job.alive)
            return QueuedJob(record.but(job_id=job.job_id), job)
        if record.job_id is None:
            # People's commands wait for each other, so one that has left this behind is dead.
            young = bool(record.by) and time.time() - record.submitted < VOID_SECONDS
            return QueuedJob(record, unknown("", "sbatch has not answered yet", answered=not young))
        # squeue names all that live, unless other people's Jobs are hidden from this user.
        hidden = record.user not in ("", job_ledger.this_user())
        return QueuedJob(record, unknown(record.job_id, "squeue no longer names it", answered=not hidden))

    def _is(self, record: JobRecord, job: SlurmJob, taken: Collection[str] = ()) -> bool:
        """Tell whether a Job of the queue is that of an entry: by its token, where the site leaves comments alone."""
        if record.job_id not in (None, job.job_id) or record.user not in ("", job.user):
            return False
        if self.cluster.job_mark == "comment":
            return record.token == job.comment
        return record.name == job.name and (record.job_id is not None or not self._claimed(job, taken))

    def _claimed(self, job: SlurmJob, taken: Collection[str]) -> bool:
        claimed = (record.job_id == job.job_id for record in job_ledger.read_ledger(self.run))
        return job.job_id in taken or any(claimed)

    def _unlisted(self, job: SlurmJob, records: Sequence[JobRecord]) -> QueuedJob:
        """Return a Job that lives although its entry says that it has ended, or was lost."""
        for record in reversed(records):
            if record.job_id == job.job_id and self._is(record, job):
                return QueuedJob(record.but(closed=False), job)  # it was requeued
        prefix = job_ledger.token_prefix(self.id)
        token = job.comment if job.comment.startswith(prefix) else ""
        kind = token.removeprefix(prefix).rpartition(".")[0]
        kind = kind or job.name.removeprefix(f"{self.run.name}-").removesuffix(f"-{self.id}")
        stage = kind if kind in ("pretrain", "preflight", *FOLLOWERS) else "tokenize"
        phase = kind if stage == "tokenize" and kind != stage else ""
        record = JobRecord(
            stage=stage, phase=phase, token=token, name=job.name, user=job.user, job_id=job.job_id,
            dependency=job.dependency, submitted=time.time(),
        )  # fmt: skip
        return QueuedJob(record, job)

    def _kept(self, queued: QueuedJob, records: Sequence[JobRecord]) -> QueuedJob:
        """Write down what was learned of a Job: its id, that it has ended, that there is one at all."""
        record = queued.record.but(closed=queued.job.gone)
        try:
            return queued if record in records else replace(queued, record=self._keep(record, records))
        except OSError:  # it is another person's Run, or the disk is full: it is learned again the next time
            return queued

    def _keep(self, record: JobRecord, records: Sequence[JobRecord]) -> JobRecord:
        if not record.number and not any(record.job_id == other.job_id for other in records):
            about = record.model_dump(exclude={"number", "token", "user", "job_id", "submitted"})
            fresh = job_ledger.reserve(self.run, **about)
            record = fresh.but(token=record.token or fresh.token, user=record.user, job_id=record.job_id)
        return job_ledger.keep(self.run, record)

    # Changing

    def repoint(self, queued: QueuedJob, dependency: str) -> QueuedJob:
        """Let a Job that waits wait for something else."""
        # Slurm drops the edges of a Job that is requeued: then the entry tells of one that is not there.
        if queued.record.dependency == dependency and queued.job.state == "pending" and queued.job.dependency:
            return queued
        self.slurm.update(queued.job_id, Dependency=dependency)
        return replace(queued, record=job_ledger.keep(self.run, queued.record.but(dependency=dependency)))

    def cancel(self, jobs: Iterable[QueuedJob]) -> list[str]:
        """Cancel Jobs, dependants first, so that none starts because another has ended; return their ids."""
        ids = [queued.job_id for queued in jobs if queued.record.job_id and queued.alive][::-1]
        self.slurm.cancel(ids)
        return ids


class JobQueue(RunJobs):
    """Submits Jobs of the Run, and keeps the chain in order."""

    def __init__(self, run: Run, config: Config, cluster: Cluster, slurm: Slurm) -> None:
        super().__init__(run, cluster, slurm)
        self.config = config
        self.exclusions: dict[str, Exclusion] = {}  # by Stage
        self.script_folder = run.snapshot / "sbatch"

    def submit(
        self,
        stage: str,
        dependency: str = "",
        *,
        phase: str = "",
        flags: Flags | None = None,
        without: Sequence[str] = (),
        slurm: Slurm | None = None,
        **about: Any,
    ) -> JobRecord:
        """Submit one Job; return its entry. SlurmError where Slurm does not answer: the Job may be there, or not.

        `flags` go over those of the Plan, `without` those named. A Job that Slurm refuses leaves no entry.
        """
        # A Job beside training works offline, on what is in the Run.
        carried = () if about.get("role") == "beside" else carried_names(self.cluster)
        slurm = (slurm or self.slurm).carrying(carried)
        options = {k: v for k, v in self.flags(stage, phase).items() if k not in without} | (flags or {})
        record = job_ledger.reserve(
            self.run, stage=stage, phase=phase, name=options["job-name"], dependency=dependency,
            signal_lead=_lead(options), **about,
        )  # fmt: skip
        options = with_excluded(options, self.excluded(stage, options)) | self._edges(dependency)
        script = str(self.script_folder / f"{stage}.sbatch")
        arguments = [str(self.run.root), *([phase] if phase else [])]
        try:
            job_id = slurm.submit(option_words(options), script, arguments, token=record.token)
        except (SlurmRefused, SlurmFull):
            job_ledger.drop(self.run, record)
            raise
        return job_ledger.keep(self.run, record.but(job_id=job_id))

    def flags(self, stage: str, phase: str = "") -> Flags:
        """Return the Plan's options of a Job of this Run."""
        slowest = slowest_save(self.run)  # decides how early Jobs are warned
        return job_flags(stage, self.config, self.cluster, self.run, run_id=self.id, save_seconds=slowest, phase=phase)

    def _edges(self, dependency: str) -> Flags:
        if not dependency:
            return {}
        # A Job whose condition can no longer come true would wait for ever; some sites forbid the option.
        kill = {"kill-on-invalid-dep": "yes"} if self.cluster.kill_on_invalid_dep else {}
        return {"dependency": dependency} | kill

    def excluded(self, stage: str, flags: Flags) -> list[str]:
        """Return the bad nodes that a Stage's Jobs are kept off, as far as enough others are left."""
        if stage not in self.exclusions:
            bad = bad_nodes_of(self.run, self.cluster).read().values()
            script = str(self.script_folder / f"{stage}.sbatch")
            self.exclusions[stage] = choose_exclusion(self.slurm, flags, script, bad)
        return self.exclusions[stage].names

    # The chain

    def ensure_successor(
        self, predecessor: str, since: float, slurm: Slurm | None = None, *, by: str = "", but: str = ""
    ) -> QueuedJob:
        """Make sure that exactly one Job waits behind a pretrain Job, and the rest of the chain behind that one.

        One of the Run's own that waits already is adopted, whoever submitted it, except `but`; more than one are
        cancelled but the first. SlurmError where that could not be done.
        """
        jobs = self.alive()
        here = (predecessor, but)
        waiting = [q for q in jobs if q.is_chain("pretrain") and q.waits and q.record.job_id and q.job_id not in here]
        edge = f"afterany:{predecessor},singleton"
        if waiting:
            successor = self.repoint(waiting[0], edge)
        else:
            record = self.submit("pretrain", edge, since=since, slurm=slurm, by=by)
            successor = QueuedJob(record, SlurmJob(str(record.job_id), "pending", "sbatch"))
        self.point_followers(jobs, successor.job_id)
        self.cancel(waiting[1:])  # now that nothing waits for them any more
        return successor

    def point_followers(self, jobs: Sequence[QueuedJob], segment: str) -> None:
        """Let evaluate and inference wait for a Segment, however it ends."""
        for queued in jobs:
            if queued.is_chain(*FOLLOWERS) and queued.waits:
                self.repoint(queued, f"afterany:{segment}")


def _lead(flags: Flags) -> int | None:
    text = flags.get("signal", "").rpartition("@")[2]
    return int(text) if text.isdecimal() else None
