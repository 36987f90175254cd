"""One attempt of a Job, seen from the batch shell: its Run, its cluster, and what it may ask of Slurm."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

from pipeline.cluster.schema import Cluster
from pipeline.config.load import load_run_config
from pipeline.config.schema import Config
from pipeline.errors import UserError
from pipeline.plan.flags import sbatch_flags
from pipeline.run.decision import Attempt
from pipeline.run.folder import Run
from pipeline.slurm.bad_nodes import BadNodes, bad_nodes_of
from pipeline.slurm.commands import Slurm
from pipeline.slurm.errors import SlurmError
from pipeline.slurm.exclusion import choose_exclusion, split_off
from pipeline.slurm.jobs import SlurmJob
from pipeline.submit.run_folder import read_cluster, read_jobs

EXCLUDE_SECONDS = 20


class Host:
    """What the beginning and the end of an attempt share."""

    def __init__(self, run: Run, stage: str, job_id: str, number: int) -> None:
        self.run, self.stage, self.job_id, self.number = run, stage, job_id, number
        # What of the Stage's work is this Job's; told by the job script.
        self.part = "/".join(filter(None, map(os.environ.get, ("PIPELINE_PHASE", "PIPELINE_TASK"))))
        self.config: Config = load_run_config(run.config)
        self.cluster: Cluster = read_cluster(run)
        self.slurm = Slurm()
        self._exclusions: dict[str, list[str]] = {}

    @property
    def bad_nodes(self) -> BadNodes:
        return bad_nodes_of(self.run, self.cluster)

    def nodes(self) -> list[str]:
        return self.slurm.hostnames(os.environ.get("SLURM_JOB_NODELIST", "")) or [os.uname().nodename]

    def since_submitted(self, past: Sequence[Attempt]) -> list[Attempt]:
        """Return the attempts that count for this Job: those that ended after it was submitted.

        A person who resumes a Run has seen how the earlier ones ended, and mended what was to be mended.
        """
        mine = self.job_id.partition("_")[0]
        times = [job.get("submitted", 0.0) for job in read_jobs(self.run)["jobs"] if str(job.get("job_id")) == mine]
        if not times:  # submitted by hand
            return [attempt for attempt in past if attempt.job_id == self.job_id]
        return [attempt for attempt in past if attempt.ended >= times[-1]]

    def has_moved_on(self, job: SlurmJob) -> bool:
        """Tell whether Slurm has given this Job another attempt; it counts one when it requeues, before it starts."""
        return job.restarts > self.number

    def others(self, *states: str) -> list[str]:
        """List the Run's other Jobs that are in one of `states`, dependants first."""
        ids = [str(job["job_id"]) for job in read_jobs(self.run)["jobs"] if job.get("job_id")]
        ids = [job_id for job_id in ids if job_id != self.job_id]
        if not ids:
            return []
        try:
            found = self.slurm.jobs(ids)
        except SlurmError as error:
            print(f"{self.stage}: {error}", file=sys.stderr)
            return []
        return [job_id for job_id in reversed(ids) if found[job_id].state in states]

    def cancel_rest(self) -> None:
        """Cancel the Run's waiting Jobs: what they wait for will not come."""
        waiting = self.others("pending", "requeue_hold")
        if waiting and self.cluster.nodes_may_submit:
            self.attempt(f"cancel {', '.join(waiting)}", lambda: self.slurm.cancel(waiting))

    def excluded(self, stage: str) -> list[str]:
        """Return the nodes that a Stage's Jobs are to be kept off: the user's own, and bad ones if others are left."""
        if stage not in self._exclusions:
            flags = sbatch_flags(stage, 0, self.config, self.cluster, self.run)
            script = str(self.run.snapshot / "sbatch" / f"{stage}.sbatch")
            found = choose_exclusion(self.slurm, flags, script, self.bad_nodes.read().values())
            if found.allowed:
                print(f"{stage}: {found.words()}", file=sys.stderr)
                self.event("bad nodes allowed", of=stage, nodes=[node.name for node in found.allowed])
            self._exclusions[stage] = split_off(flags)[1] + found.names
        return self._exclusions[stage]

    def requeue(self) -> bool:
        """Put this very Job back into the queue, away from bad nodes; Slurm then ends the script with SIGTERM."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            job = self.slurm.jobs([self.job_id])[self.job_id]
        except SlurmError:
            job = None
        if job is not None and (self.has_moved_on(job) or job.state in ("pending", "requeued", "preempted")):
            return True  # Slurm has done so by itself, as on preemption; once more would hit the next attempt
        if job is not None and job.state == "completing":
            return False  # cancelled by a person, or killed at its time limit
        exclude = ",".join(self.excluded(self.stage))
        if not self.attempt("requeue this job", lambda: self.slurm.requeue(self.job_id)):
            return False
        deadline = time.monotonic() + EXCLUDE_SECONDS
        wanted = exclude or self.bad_nodes.path.is_file()  # nodes that it was kept off before may be allowed by now
        while wanted and time.monotonic() < deadline:  # refused until the job has left its nodes
            if self.attempt("", lambda: self.slurm.update(self.job_id, ExcNodeList=exclude)):
                break
            time.sleep(0.5)
        return True

    def attempt(self, what: str, act: Any) -> bool:
        """Do what may fail without harm to the verdict; say so if it does."""
        try:
            act()
        except UserError as error:
            if what:
                print(f"{self.stage}: cannot {what}: {error}", file=sys.stderr)
            return False
        return True

    def event(self, kind: str, **details: Any) -> None:
        self.run.event(kind, stage=self.stage, job_id=self.job_id, attempt=self.number, **details)
