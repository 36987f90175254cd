"""Hand a Plan to Slurm: every Job once, however often this is called and wherever it was interrupted before."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from rich.console import Console
from rich.text import Text

from pipeline.cluster.schema import Cluster
from pipeline.config.schema import Config
from pipeline.errors import EXIT_DONE, NotReadyError, StorageError, UserError
from pipeline.evaluation.backfill import Backfill
from pipeline.hints import command
from pipeline.image.container import check_pyxis
from pipeline.plan.flags import TOKENIZE_PHASES, Flags, array_range
from pipeline.plan.jobs import ALONE, STAGES, Job, Plan
from pipeline.run.complete import is_complete
from pipeline.run.folder import Run
from pipeline.run.owner import check_held
from pipeline.run.records import JobRecord
from pipeline.slurm.commands import Slurm
from pipeline.slurm.errors import SlurmError
from pipeline.slurm.options import option_words
from pipeline.slurm.time_limits import time_seconds
from pipeline.submit.missing import Place, begun_segments, chain_since, missing_places
from pipeline.submit.queue import FOLLOWERS, JobQueue, QueuedJob
from pipeline.submit.run_folder import PROJECT

ORDER = (*ALONE, *STAGES)


class Submission:
    """What a Plan still needs: the Jobs that are neither complete nor queued, behind those that are."""

    def __init__(
        self,
        run: Run,
        config: Config,
        cluster: Cluster,
        plan: Plan,
        slurm: Slurm,
        *,
        is_new: bool = False,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.run, self.config, self.cluster, self.plan, self.slurm = run, config, cluster, plan, slurm
        self.queue = JobQueue(run, config, cluster, slurm)
        if not run.snapshot.is_dir():  # --test, before there is a Run
            self.queue.script_folder = PROJECT / "sbatch"
        self.check = check  # raises where this call may submit no longer; asked before each Job
        self.is_new = is_new  # the Run has its id from this very process: the queue cannot hold a Job of it
        stages = {job.stage for job in plan.jobs}
        self.role = "alone" if stages <= {*FOLLOWERS} or stages <= {*ALONE} else "chain"
        self.ids: dict[str, str] = {}  # name in the Plan -> id of the Jobs that later ones may depend on
        self.last_segment = ""  # id of the one that the chain comes to last
        self.queued: dict[str, str] = {}  # name -> id of what is at Slurm by now, also where the rest is refused
        self.surplus: list[QueuedJob] = []
        self.since = time.time()

    def submit(self, told: Callable[[Text], None]) -> list[str]:
        """Submit what is neither complete nor queued; return the names of the Jobs that were submitted."""
        alive = [] if self.is_new else self.queue.alive()
        self.queued = {f"{queued.record.kind} {queued.job_id}": queued.job_id for queued in alive}
        _refuse_unheard(alive, self.run)
        jobs = self._jobs(alive)
        missing = self._missing(alive)
        segments = [queued for queued in alive if queued.is_chain("pretrain")]
        self.last_segment = segments[-1].job_id if segments else ""
        submitted = []
        # One of several Segments that is missing comes behind those that are there.
        for job in sorted(jobs, key=lambda job: (ORDER.index(job.stage), job.name in missing)):
            living = [queued for queued in alive if place_of_job(job).is_of(queued, self.role)]
            if living:
                submitted += self._adopt(job, living, told)
            elif job.name in missing:
                record = self._submit(job, alive)
                submitted.append(job.name)
                told(_titled(job, f"submitted as job {record.job_id}, {record.dependency}".rstrip(", ")))
        self.queue.cancel(self.surplus)  # now that nothing waits for them any more
        return submitted

    def _jobs(self, alive: list[QueuedJob]) -> list[Job]:
        """Return the Plan's Jobs; a tokenize that an earlier Plan cut in another way stands for the new ones."""
        planned = [job for job in self.plan.jobs if job.stage == "tokenize"]
        others = [q for q in alive if q.is_chain("tokenize") and q.record.phase not in {job.phase for job in planned}]
        if not planned or not others:
            return self.plan.jobs
        last = others[-1]
        if last.record.phase not in ("", TOKENIZE_PHASES[-1]) or last.job.stuck:
            words = f"{last.record.kind} of an earlier plan (job {last.job_id}) is at work"
            raise NotReadyError(f"{words}; wait for its end, or end it: {command('cancel', self.run.root)}")
        self.ids |= {job.name: last.job_id for job in planned}
        return [job for job in self.plan.jobs if job not in planned]

    def _missing(self, alive: list[QueuedJob]) -> set[str]:
        """Return the names of the Plan's Jobs that have work to do and none of whose kind is alive."""
        begun = begun_segments(self.run, alive) if any(job.segment for job in self.plan.jobs) else ()
        places = missing_places(map(place_of_job, self.plan.jobs), alive, self._is_complete, begun, self.role)
        return {place.name for place in places}

    def _is_complete(self, stage: str) -> bool:
        return is_complete(self.run, self.config, stage)

    def _adopt(self, job: Job, living: list[QueuedJob], told: Callable[[Text], None]) -> list[str]:
        """Take Jobs that are alive already; where what they wait for was submitted anew, let them wait for that.

        Return the Job's name where a successor had to be submitted.
        """
        if job.stage == "pretrain" and not job.segment:
            living = self._adopt_segments(living)
            self.last_segment = living[-1].job_id
        dependency = self._dependency(job, "" if job.stage == "pretrain" else self.last_segment)
        if dependency and (job.stage != "pretrain" or self._tokenize_is_new(job)):
            living = [self.queue.repoint(queued, dependency) if queued.waits else queued for queued in living]
        newest = living[-1]
        self.ids[job.name] = newest.job_id
        if newest.job.lacks_nodes:  # those that it was kept off when it was submitted, or since, may be too many by now
            names = self.queue.excluded(job.stage, self.queue.flags(job.stage, job.phase))
            self.slurm.update(newest.job_id, ExcNodeList=",".join(names))
        fresh = [queued for queued in living if queued.job.source == "sbatch"]
        for queued in living:
            self.queued[f"{queued.record.kind} {queued.job_id}"] = queued.job_id
            how = f"submitted as job {queued.job_id}, {queued.record.dependency}" if queued in fresh else ""
            told(_titled(job, how or f"{queued.job.state} already, job {queued.job_id}"))
        return [job.name] if fresh else []

    def _adopt_segments(self, living: list[QueuedJob]) -> list[QueuedJob]:
        """Leave one that works and one that waits; where none waits behind one that works, queue it."""
        if not self.cluster.nodes_may_submit:
            return living
        working = [queued for queued in living if not queued.waits]
        waiting = [queued for queued in living if queued.waits]
        if working and not self._is_complete("pretrain"):
            return [working[-1], self.queue.ensure_successor(working[-1].job_id, self.since)]
        self.surplus += waiting[1:]
        return [*working[-1:], *waiting[:1]]

    def _tokenize_is_new(self, job: Job) -> bool:
        return any(edge.startswith("afterok:") and edge.partition(":")[2] in self.ids for edge in job.after)

    def _submit(self, job: Job, alive: list[QueuedJob]) -> JobRecord:
        self.check()
        flags: Flags = {}
        tasks = self._tasks(job)
        if job.tasks > 1:
            flags["array"] = array_range(tasks, self.config.tokenize.max_running_tasks)
        record = self.queue.submit(
            job.stage, self._dependency(job, self.last_segment), phase=job.phase, flags=flags, segment=job.segment,
            tasks=tasks, since=(chain_since(alive) if job.segment else None) or self.since, role=self.role,
        )  # fmt: skip
        self.ids[job.name] = str(record.job_id)
        self.queued[f"{record.kind} {record.job_id}"] = str(record.job_id)
        if job.stage == "pretrain":
            self.last_segment = str(record.job_id)
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

    def _dependency(self, job: Job, segment: str = "") -> str:
        """Return the edges to Jobs that are still to end, in sbatch's spelling; to `segment` in place of the Plan's."""
        edges = []
        for edge in job.after:
            kind, _, name = edge.partition(":")
            parent = segment if self.role == "chain" and name.startswith("pretrain") and segment else self.ids.get(name)
            if not name:
                edges.append(kind)
            elif parent:
                edges.append(f"{kind}:{parent}")
        return ",".join(edges)


def place_of_job(job: Job) -> Place:
    """Return what a Job of the Plan does."""
    return Place(job.name, job.stage, job.segment, job.phase)


def _titled(job: Job, text: str) -> Text:
    return Text.assemble((job.name, "bold"), "  ", text)


def _refuse_unheard(alive: list[QueuedJob], run: Run) -> None:
    """Wait for a submission whose answer was not heard: to submit again might make two of it."""
    unheard = [queued for queued in alive if queued.record.job_id is None]
    if unheard:
        path = run.job_record(unheard[0].record.number)
        raise NotReadyError(
            f"{path}: sbatch was called for {unheard[0].record.kind} a moment ago and has not answered; "
            f"give the same command again in a minute: {command('resume', run.root)}"
        )


class HalfSubmitted(UserError):
    """Slurm refused a Job of the chain, or did not answer, after others were queued."""

    def __init__(self, error: SlurmError, run: Run, queued: list[str]) -> None:
        self.exit_code = error.exit_code
        super().__init__(
            f"{error}\nQueued already: {', '.join(queued)}. The same command again adds what is missing:\n"
            f"  {command('resume', run.root)}\nTo take back what is queued:\n  {command('cancel', run.root)}"
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
    check = partial(check_held, run.control / "scheduler.json", f"Run {run.name}")
    submission = Submission(run, config, cluster, plan, slurm, is_new=is_new, check=check)

    def told(text: Text) -> None:
        try:
            console.print(text, soft_wrap=True)
        except (OSError, ValueError, SystemExit):  # a reader that has seen enough (| head; rich ends the process then),
            console.quiet = True  # or a full disk, is no reason to leave the chain half submitted

    try:
        submitted = submission.submit(told)
    except SlurmError as error:
        if not submission.queued:
            raise
        raise HalfSubmitted(error, run, list(submission.queued)) from error
    if submitted:
        try:
            run.event("submit", jobs={name: submission.ids[name] for name in submitted})
        except OSError as error:
            raise StorageError(f"{run.events}: {error.strerror}; the Jobs are submitted") from error
    for stage, exclusion in submission.queue.exclusions.items():
        if exclusion.allowed:
            run.event("bad nodes allowed", stage=stage, nodes=[node.name for node in exclusion.allowed])
            told(Text(f"{stage}: {exclusion.words()}", "yellow"))
    queue_evaluations(submission)
    for verb in ("status", "logs -f", "stop"):
        told(Text(f"  {command(*verb.split(), run.root)}"))
    return EXIT_DONE
