"""Hand a Plan to Slurm: every Job once, however often this is called and wherever it was interrupted before."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.markup import escape

from pipeline.cluster.schema import Cluster
from pipeline.config.schema import Config
from pipeline.errors import EXIT_DONE, NotReadyError, StorageError
from pipeline.evaluation.backfill import Backfill
from pipeline.hints import command
from pipeline.image.container import check_pyxis
from pipeline.plan.flags import TOKENIZE_PHASES, Flags, array_range
from pipeline.plan.jobs import ALONE, Job, Plan
from pipeline.run.complete import is_complete
from pipeline.run.folder import Run
from pipeline.run.records import JobRecord
from pipeline.slurm.commands import Slurm
from pipeline.slurm.errors import SlurmError
from pipeline.slurm.options import option_words
from pipeline.slurm.time_limits import time_seconds
from pipeline.submit.queue import FOLLOWERS, JobQueue, QueuedJob
from pipeline.submit.run_folder import PROJECT


class Submission:
    """What a Plan still needs: the Jobs that are neither complete nor queued, behind those that are."""

    def __init__(
        self, run: Run, config: Config, cluster: Cluster, plan: Plan, slurm: Slurm, *, is_new: bool = False
    ) -> None:
        self.run, self.config, self.cluster, self.plan, self.slurm = run, config, cluster, plan, slurm
        self.queue = JobQueue(run, config, cluster, slurm)
        if not run.snapshot.is_dir():  # --test, before there is a Run
            self.queue.script_folder = PROJECT / "sbatch"
        self.is_new = is_new  # the Run has its id from this very process: the queue cannot hold a Job of it
        stages = {job.stage for job in plan.jobs}
        self.role = "alone" if stages <= {*FOLLOWERS} or stages <= {*ALONE} else "chain"
        self.ids: dict[str, str] = {}  # name in the Plan -> id of the Jobs that later ones may depend on
        self.since = time.time()

    def submit(self, told: Callable[[str], None]) -> list[str]:
        """Submit what is neither complete nor queued; return the names of the Jobs that were submitted."""
        alive = [] if self.is_new else self.queue.alive()
        _refuse_unheard(alive, self.run)
        wanted = self._wanted(alive)
        submitted = []
        for job in self.plan.jobs:
            living = [queued for queued in alive if _does(queued, job, self.role)]
            if living:
                self._adopt(job, living, told)
            elif job in wanted:
                record = self._submit(job)
                submitted.append(job.name)
                told(f"[bold]{job.name}[/]  submitted as job {record.job_id}, {record.dependency}".rstrip(", "))
        return submitted

    def _wanted(self, alive: list[QueuedJob]) -> list[Job]:
        """Return the Plan's Jobs that have work to do and none of whose kind is alive."""
        wanted = [job for job in self.plan.jobs if not is_complete(self.run, self.config, job.stage)]
        wanted = [job for job in wanted if not self._is_past(job, alive)]
        if any(queued.is_chain("pretrain") for queued in alive):
            # One that lives has the others behind it, or sees to them when it begins: another one would be a second.
            wanted = [job for job in wanted if job.stage != "pretrain"]
        return wanted

    def _is_past(self, job: Job, alive: list[QueuedJob]) -> bool:
        """Tell whether a later phase of the Job's Stage is queued already, so that this one has ended well."""
        later = TOKENIZE_PHASES[TOKENIZE_PHASES.index(job.phase) + 1 :] if job.phase else ()
        return any(queued.is_chain(job.stage) and queued.record.phase in later for queued in alive)

    def _adopt(self, job: Job, living: list[QueuedJob], told: Callable[[str], None]) -> None:
        """Take Jobs that are alive already; where what they wait for was submitted anew, let them wait for that."""
        if job.stage == "pretrain" and not job.segment:
            living = self._adopt_segments(living)
        newest = living[-1]
        dependency = self._dependency(job)
        if (newest.waits and dependency and job.stage != "pretrain") or (
            newest.waits and job.stage == "pretrain" and self._tokenize_is_new(job)
        ):
            newest = self.queue.repoint(newest, dependency)
        self.ids[job.name] = newest.job_id
        if newest.job.lacks_nodes:  # those that it was kept off when it was submitted, or since, may be too many by now
            names = self.queue.excluded(job.stage, self.queue.flags(job.stage, job.phase))
            self.slurm.update(newest.job_id, ExcNodeList=",".join(names))
        for queued in living:
            told(f"[bold]{job.name}[/]  {queued.job.state} already, job {queued.job_id}")

    def _adopt_segments(self, living: list[QueuedJob]) -> list[QueuedJob]:
        """Leave one that works and one that waits; where none waits behind one that works, queue it."""
        working = [queued for queued in living if not queued.waits]
        waiting = [queued for queued in living if queued.waits]
        if working and self.cluster.nodes_may_submit:
            successor = self.queue.ensure_successor(working[-1].job_id, self.since)
            return [working[-1], successor]
        if len(waiting) > 1 and self.cluster.nodes_may_submit:
            self.queue.cancel(waiting[1:])
        return [*working[-1:], *waiting[:1]] if self.cluster.nodes_may_submit else living

    def _tokenize_is_new(self, job: Job) -> bool:
        return any(edge.startswith("afterok:") and edge.partition(":")[2] in self.ids for edge in job.after)

    def _submit(self, job: Job) -> JobRecord:
        flags: Flags = {}
        tasks = self._tasks(job)
        if job.tasks > 1:
            flags["array"] = array_range(tasks, self.config.tokenize.max_running_tasks)
        record = self.queue.submit(
            job.stage, self._dependency(job), phase=job.phase, flags=flags, segment=job.segment, tasks=tasks,
            since=self.since, role=self.role,
        )  # fmt: skip
        self.ids[job.name] = str(record.job_id)
        return record

    def test(self, told: Callable[[str], None]) -> None:
        """Ask Slurm, Job by Job, whether it would take it, and when it would start; nothing is queued."""
        for job in self.plan.jobs:
            # The Run may not be there yet, and sbatch reads the script.
            script = str(PROJECT / "sbatch" / f"{job.stage}.sbatch")
            words = option_words(self.queue.flags(job.stage, job.phase))
            told(f"{job.name}: {self.slurm.test_only(words, script, job.arguments)}")

    def _tasks(self, job: Job) -> int:
        """Return how many tasks the array gets: fewer where Slurm takes no larger one, and each does more pieces."""
        if job.tasks == 1:
            return 1
        try:
            most = int(self.slurm.config().get("MaxArraySize", ""))
        except (SlurmError, ValueError):
            return job.tasks  # sbatch will say it
        return max(1, min(job.tasks, most))  # numbers are below MaxArraySize

    def _dependency(self, job: Job) -> str:
        """Return the edges to Jobs that are still to end, in sbatch's spelling."""
        edges = []
        for edge in job.after:
            kind, _, name = edge.partition(":")
            if not name:
                edges.append(kind)
            elif name in self.ids:
                edges.append(f"{kind}:{self.ids[name]}")
        return ",".join(edges)


def _does(queued: QueuedJob, job: Job, role: str) -> bool:
    """Tell whether a Job at Slurm does what one of the Plan is to do."""
    record = queued.record
    if record.stage != job.stage or record.phase != job.phase or record.role not in ("chain", role):
        return False
    return not job.segment or queued.record.segment in (0, job.segment)


def _refuse_unheard(alive: list[QueuedJob], run: Run) -> None:
    """Wait for a submission whose answer was not heard: to submit again might make two of it."""
    unheard = [queued for queued in alive if queued.record.job_id is None]
    if unheard:
        path = run.job_record(unheard[0].record.number)
        raise NotReadyError(
            f"{path}: sbatch was called for {unheard[0].record.kind} a moment ago and has not answered; "
            f"give the same command again in a minute: {command('resume', run.root)}"
        )


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
        except (OSError, ValueError, SystemExit):  # a reader that has seen enough (| head; rich ends the process then),
            console.quiet = True  # or a full disk, is no reason to leave the chain half submitted

    submitted = submission.submit(told)
    if submitted:
        try:
            run.event("submit", jobs={name: submission.ids[name] for name in submitted})
        except OSError as error:
            raise StorageError(f"{run.events}: {error.strerror}; the Jobs are submitted") from error
    for stage, exclusion in submission.queue.exclusions.items():
        if exclusion.allowed:
            run.event("bad nodes allowed", stage=stage, nodes=[node.name for node in exclusion.allowed])
            told(f"[yellow]{escape(f'{stage}: {exclusion.words()}')}[/]")
    queue_evaluations(submission)
    for verb in ("status", "logs -f", "stop"):
        told(f"  {escape(command(*verb.split(), run.root))}")
    return EXIT_DONE
