"""Hand a Plan to Slurm: every Job once, however often this is called and wherever it was interrupted before."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rich.console import Console

from pipeline.cluster.schema import Cluster
from pipeline.config.schema import Config
from pipeline.errors import EXIT_DONE, NotReadyError
from pipeline.evaluation.backfill import Backfill
from pipeline.files import write_json
from pipeline.hints import command
from pipeline.image.container import check_pyxis
from pipeline.plan.flags import TOKENIZE_PHASES, array_flag
from pipeline.plan.jobs import Job, Plan
from pipeline.run.complete import is_complete
from pipeline.run.folder import Run
from pipeline.run.records import read_record
from pipeline.slurm.bad_nodes import bad_nodes_of
from pipeline.slurm.commands import Slurm
from pipeline.slurm.errors import SlurmError
from pipeline.slurm.exclusion import Exclusion, choose_exclusion, option, split_off
from pipeline.slurm.jobs import SlurmJob
from pipeline.slurm.states import LIVE
from pipeline.slurm.time_limits import time_seconds
from pipeline.submit.run_folder import PROJECT, read_jobs

Record = dict[str, Any]


class Submission:
    """The Run's Jobs at Slurm: jobs.json, written again after every sbatch, and what the queue says about them."""

    def __init__(
        self, run: Run, config: Config, cluster: Cluster, plan: Plan, slurm: Slurm, *, is_new: bool = False
    ) -> None:
        self.run, self.config, self.cluster, self.plan, self.slurm = run, config, cluster, plan, slurm
        self.is_new = is_new  # the Run has its id from this very process: the queue cannot hold a Job of it
        self.id = str(read_record(run.record).get("id", run.name))
        self.records: list[Record] = [job for job in read_jobs(run)["jobs"] if job.get("job_id")]
        self.ids: dict[str, str] = {}  # name -> id of the Jobs that the later ones may depend on
        self.exclusions: dict[str, Exclusion] = {}  # by stage
        self.tasks = {job.name: self._tasks(job) for job in plan.jobs if job.tasks > 1}

    def submit(self, told: Callable[[str], None]) -> list[str]:
        """Submit what is neither complete nor queued; return the names of the Jobs that were submitted."""
        live = self._live()
        submitted = []
        for job in self._jobs(live):
            if job.name not in live and (is_complete(self.run, self.config, job.stage) or self._is_past(job, live)):
                continue
            dependency = self._dependency(job)
            if job.name in live:
                self._adopt(job, live[job.name], dependency, told)
                continue
            job_id = self.slurm.submit(self._flags(job, dependency), *self._script(job), token=self._token(job.name))
            self._record(job, job_id, dependency)
            submitted.append(job.name)
            told(f"[bold]{job.name}[/]  submitted as job {job_id}" + (f", {dependency}" if dependency else ""))
        return submitted

    def commands(self) -> list[list[str]]:
        """Return the literal sbatch lines of the Jobs that are not complete, names in place of ids still unknown."""
        return [
            ["sbatch", "--parsable", *self._flags(job, ",".join(job.after)), *_words(self._script(job))]
            for job in self.plan.jobs
            if not is_complete(self.run, self.config, job.stage)
        ]

    def test(self, told: Callable[[str], None]) -> None:
        """Ask Slurm, Job by Job, whether it would take it, and when it would start; nothing is queued."""
        for job in self.plan.jobs:
            # The Run may not be there yet, and sbatch reads the script.
            script, arguments = str(PROJECT / "sbatch" / f"{job.stage}.sbatch"), self._script(job)[1]
            told(f"{job.name}: {self.slurm.test_only(self._flags(job, ''), script, arguments)}")

    def _tasks(self, job: Job) -> int:
        """Return how many tasks the array gets: fewer where Slurm takes no larger one, and each does more pieces."""
        try:
            most = int(self.slurm.config().get("MaxArraySize", ""))
        except (SlurmError, ValueError):
            return job.tasks  # sbatch will say it
        return max(1, min(job.tasks, most))  # numbers are below MaxArraySize

    def _is_past(self, job: Job, live: dict[str, SlurmJob]) -> bool:
        """Tell whether a later phase of the Job's Stage is queued already, so that this one has ended well."""
        following = self.plan.jobs[self.plan.jobs.index(job) + 1 :] if job.phase else []
        return any(later.stage == job.stage and later.name in live for later in following)

    def _live(self) -> dict[str, SlurmJob]:
        """Return the Jobs of this Run that are queued or running, by name, in one or two calls of Slurm.

        By jobs.json, and by their comment: a submit that was killed may not have written down its last one.
        """
        if self.is_new:
            return {}
        known = {str(record["job_id"]): str(record["name"]) for record in self.records if record.get("name")}
        tokens = {self._token(job.name): job.name for job in self.plan.jobs}
        for token, job_id in self.slurm.find(list(tokens)).items():
            if job_id not in known:
                known[job_id] = tokens[token]
                job = next(job for job in self.plan.jobs if job.name == tokens[token])
                self._record(job, job_id, None)
        if not known:
            return {}
        jobs = self.slurm.jobs(list(known))
        return {known[job_id]: job for job_id, job in jobs.items() if job.state in LIVE}

    def _jobs(self, live: dict[str, SlurmJob]) -> list[Job]:
        """Return the Plan's Jobs; while Segments or phases of an earlier Plan are queued, those stand for new ones."""
        jobs, planned = self.plan.jobs, {job.name for job in self.plan.jobs}
        for stage in ("tokenize", "pretrain"):
            stray = [
                record for record in self.records
                if record["stage"] == stage and record.get("name") in live and record["name"] not in planned
            ]  # fmt: skip
            if stray and stray[-1].get("phase") not in (None, "", TOKENIZE_PHASES[-1]):
                words = f"{stray[-1]['name']} of an earlier plan (job {stray[-1]['job_id']}) is at work"
                raise NotReadyError(f"{words}; wait for its end, or end it: {command('cancel', self.run.root)}")
            if stray:
                self.ids |= {job.name: str(stray[-1]["job_id"]) for job in jobs if job.stage == stage}
                jobs = [job for job in jobs if job.stage != stage]
        return jobs

    def _adopt(self, job: Job, found: SlurmJob, dependency: str, told: Callable[[str], None]) -> None:
        """Take a Job that is queued already; where what it waits for was submitted anew, let it wait for that."""
        self.ids[job.name] = found.job_id
        record = next(r for r in reversed(self.records) if str(r["job_id"]) == found.job_id)
        if found.state == "pending" and dependency and record.get("dependency") not in (dependency, None):
            self.slurm.update(found.job_id, Dependency=dependency)
            record["dependency"] = dependency
            self._write()
        if found.lacks_nodes:  # those that it was kept off when it was submitted, or since, may be too many by now
            self.slurm.update(found.job_id, ExcNodeList=",".join(self._excluded(job)))
        told(f"[bold]{job.name}[/]  {found.state} already, job {found.job_id}")

    def _dependency(self, job: Job) -> str:
        """Return the edges to Jobs that are still to end, in sbatch's spelling."""
        edges = []
        for edge in job.after:
            kind, _, name = edge.partition(":")
            if name in self.ids:
                edges.append(f"{kind}:{self.ids[name]}")
        return ",".join(edges)

    def _flags(self, job: Job, dependency: str) -> list[str]:
        flags = split_off(self._own_flags(job))[0] + option(self._excluded(job))
        if dependency:
            # Or a Job whose condition can no longer come true would wait for ever.
            flags += [f"--dependency={dependency}", "--kill-on-invalid-dep=yes"]
        return flags

    def _own_flags(self, job: Job) -> list[str]:
        """Return the Plan's options of a Job, with as many tasks of an array as Slurm takes."""
        flags = [word for word in job.command[2 : -1 - job.arguments] if not word.startswith("--dependency=")]
        if job.name not in self.tasks:
            return flags
        array = array_flag(self.tasks[job.name], self.config.tokenize.max_running_tasks)
        return [array if word.startswith("--array=") else word for word in flags]

    def _excluded(self, job: Job) -> list[str]:
        """Return the nodes that a Job is kept off: the user's own, and those that failed, as far as others are left."""
        flags = self._own_flags(job)
        if job.stage not in self.exclusions:
            bad = bad_nodes_of(self.run, self.cluster).read().values()
            script = str(PROJECT / "sbatch" / f"{job.stage}.sbatch")
            self.exclusions[job.stage] = choose_exclusion(self.slurm, flags, script, bad)
        return split_off(flags)[1] + self.exclusions[job.stage].names

    def _script(self, job: Job) -> tuple[str, list[str]]:
        return job.command[-1 - job.arguments], job.command[-job.arguments :]

    def _token(self, name: str) -> str:
        """Name this very submission: a Job that is submitted anew must not be taken for its predecessor."""
        times = sum(record.get("name") == name for record in self.records)
        return f"pipeline:{self.id}:{name}.{times}"

    def _record(self, job: Job, job_id: str, dependency: str | None) -> None:
        self.ids[job.name] = job_id
        self.records.append(
            {
                "name": job.name, "stage": job.stage, "segment": job.segment, "phase": job.phase,
                "tasks": self.tasks.get(job.name, 1), "job_id": job_id,
                "dependency": dependency, "submitted": time.time(), "state": "pending", "reason": "", "attempt": None,
                "log": None, "started": None, "ended": None,
            }
        )  # fmt: skip
        self._write()

    def _write(self) -> None:
        """Write jobs.json. Not to the disk at once: after a power loss the queue is asked for our comments instead."""
        write_json(self.run.jobs, {"scheduler": "slurm", "jobs": self.records}, durable=False)


def queue_evaluations(submission: Submission) -> None:
    """Where nodes may not submit, queue evaluate Jobs beforehand, spread over the time of the Segments."""
    config, cluster = submission.config, submission.cluster
    if not config.evaluate.beside_training or cluster.nodes_may_submit:
        return
    segments = [name for name in submission.ids if name.startswith("pretrain")]
    minutes = time_seconds(config.pretrain.time) // 60
    each = max(1, config.evaluate.most_jobs // max(1, len(segments)))
    places = [(submission.ids[name], minutes * at // (each + 1)) for name in segments for at in range(1, each + 1)]
    Backfill(submission.run, config, cluster, submission.slurm).queue_beforehand(places)


def _words(script: tuple[str, list[str]]) -> list[str]:
    return [script[0], *script[1]]


def submit_chain(
    run: Run, config: Config, cluster: Cluster, plan: Plan, console: Console, *, is_new: bool = False
) -> int:
    """Submit the whole chain and say how to watch it. The caller owns control/scheduler.json."""
    slurm = cluster.slurm()
    check_pyxis(cluster, slurm)
    submission = Submission(run, config, cluster, plan, slurm, is_new=is_new)

    def told(text: str) -> None:
        try:
            console.print(text, highlight=False, soft_wrap=True)
        except (BrokenPipeError, SystemExit):  # the latter is rich's: a reader that has seen enough (| head) ...
            console.quiet = True  # ... is no reason to leave the chain half submitted

    submitted = submission.submit(told)
    if submitted:
        run.event("submit", jobs={name: submission.ids[name] for name in submitted})
    for stage, exclusion in submission.exclusions.items():
        if exclusion.allowed:
            run.event("bad nodes allowed", stage=stage, nodes=[node.name for node in exclusion.allowed])
            console.print(f"{stage}: {exclusion.words()}", style="yellow", markup=False, soft_wrap=True)
    queue_evaluations(submission)
    for verb in ("status", "logs -f", "stop"):
        console.print(f"  {command(*verb.split(), run.root)}", markup=False, highlight=False, soft_wrap=True)
    return EXIT_DONE
