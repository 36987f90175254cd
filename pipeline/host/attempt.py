"""One attempt of a Job, seen from the batch shell: its Run, its cluster, and what it may ask of Slurm."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from pipeline.cluster.schema import Cluster
from pipeline.config.load import load_run_config
from pipeline.config.schema import Config
from pipeline.errors import UserError
from pipeline.host.allocation import nodes_of
from pipeline.run.decision import Attempt
from pipeline.run.folder import Run
from pipeline.run.job_ledger import entry_of
from pipeline.slurm.bad_nodes import BadNodes, bad_nodes_of
from pipeline.slurm.errors import SlurmError, SlurmFull, SlurmRefused
from pipeline.slurm.exclusion import own_exclude
from pipeline.slurm.jobs import SlurmJob
from pipeline.submit.queue import JobQueue, QueuedJob
from pipeline.submit.run_folder import read_cluster

UPDATE_SECONDS = 20  # that a requeued Job may take to leave its nodes; before, Slurm changes nothing of it
PATIENCE = 1500.0  # seconds that a question to Slurm is asked again, at most


class Host:
    """What the beginning and the end of an attempt share."""

    def __init__(self, run: Run, stage: str, job_id: str, number: int) -> None:
        self.run, self.stage, self.job_id, self.number = run, stage, job_id, number
        # What of the Stage's work is this Job's; told by the job script.
        self.part = "/".join(filter(None, map(os.environ.get, ("PIPELINE_PHASE", "PIPELINE_TASK"))))
        self.config: Config = load_run_config(run.config)
        self.cluster: Cluster = read_cluster(run)
        self.asks = self.cluster.nodes_may_submit  # else no command of Slurm's but srun is called on nodes
        self.slurm = self.cluster.slurm_on_nodes()
        self.queue = JobQueue(run, self.config, self.cluster, self.slurm)
        self.entry = entry_of(run, job_id)  # None: a person has submitted it by hand
        self._exclusions: dict[str, list[str]] = {}

    @property
    def name(self) -> str:
        return f"{self.job_id}.{self.number}"

    @property
    def since(self) -> float:
        """Return when a person last started the chain (unix s)."""
        return self.entry.since or self.entry.submitted if self.entry else 0.0

    @property
    def bad_nodes(self) -> BadNodes:
        return bad_nodes_of(self.run, self.cluster)

    def nodes(self) -> list[str]:
        return nodes_of(os.environ)

    def environment(self) -> str:
        """Name the interpreter and the image that ranks run with; what one node can, all can with the same."""
        return " ".join(filter(None, (self.cluster.python, self.cluster.image)))

    def since_started(self, past: Sequence[Attempt]) -> list[Attempt]:
        """Return the attempts that count: those that ended after a person last started the chain.

        A person who resumes a Run has seen how the earlier ones ended, and mended what was to be mended.
        """
        if self.entry is None:  # submitted by hand
            return [attempt for attempt in past if attempt.job_id == self.job_id]
        return [attempt for attempt in past if attempt.ended >= self.since]

    def has_moved_on(self, job: SlurmJob) -> bool:
        """Tell whether Slurm has given this Job another attempt; it counts one when it requeues, before it starts."""
        return job.restarts > self.number

    def others(self) -> list[QueuedJob]:
        """List the Run's other Jobs that wait; none where that cannot be learned."""
        try:
            alive = self.queue.alive() if self.asks else []
        except SlurmError as error:
            self.say(str(error))
            return []
        return [q for q in alive if q.waits and q.job_id != self.job_id.partition("_")[0]]

    def cancel_rest(self) -> None:
        """Cancel the Run's waiting Jobs: what they wait for will not come."""
        if rest := self.others():
            self.try_or_say(f"cancel {', '.join(q.job_id for q in rest)}", lambda: self.queue.cancel(rest))

    def cancel_segments(self) -> None:
        """Cancel the Segments that wait: training needs none any more."""
        if segments := [queued for queued in self.others() if queued.is_chain("pretrain")]:
            self.try_or_say("cancel Segments that are not needed", lambda: self.queue.cancel(segments))

    def put_off(self, successor: QueuedJob, seconds: int, reason: str) -> bool:
        """Let the successor begin later: what fails at once, again and again, must not burn the allocation."""
        self.event("backing off", seconds=seconds, reason=reason)
        return self.try_or_say("put it off", lambda: self.slurm.update(successor.job_id, StartTime=f"now+{seconds}"))

    def excluded(self, stage: str) -> list[str]:
        """Return the nodes that a Stage's Jobs are to be kept off: the user's own, and bad ones if others are left."""
        if stage not in self._exclusions:
            flags = self.queue.flags(stage)
            names = self.queue.excluded(stage, flags)
            found = self.queue.exclusions[stage]
            if found.allowed:
                self.say(found.words())
                self.event("bad nodes allowed", of=stage, nodes=[node.name for node in found.allowed])
            self._exclusions[stage] = list(dict.fromkeys([*own_exclude(flags), *names]))
        return self._exclusions[stage]

    def requeue(self) -> bool:
        """Put this very Job back into the queue, away from bad nodes; Slurm then ends the script with SIGTERM."""
        if not self.asks:
            return False
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        job = self.me()
        if job is not None and (self.has_moved_on(job) or job.state in ("pending", "requeued")):
            return True  # Slurm has done so by itself, as on preemption; once more would hit the next attempt
        if job is not None and job.state in ("completing", "preempted"):
            return False  # cancelled by a person or for another Job, or killed at its time limit
        exclude = ",".join(self.excluded(self.stage))
        if not self.try_or_say("requeue this job", lambda: self.slurm.requeue(self.job_id)):
            return False
        if exclude or self.bad_nodes.is_there:  # nodes that it was kept off before may be allowed by now
            self.change_requeued(ExcNodeList=exclude)
        return True

    def change_requeued(self, **fields: str) -> None:
        """Change this very Job, which was requeued; Slurm refuses that until it has left its nodes."""
        deadline = time.monotonic() + UPDATE_SECONDS
        while time.monotonic() < deadline:
            if self.try_or_say("", lambda: self.slurm.update(self.job_id, **fields)):
                return
            time.sleep(0.5)

    def me(self) -> SlurmJob | None:
        """Return what Slurm says of this Job; None where it may not be asked, or does not answer."""
        if not self.asks:
            return None
        job = self.slurm.jobs([self.job_id])[self.job_id]
        return job if job.answered else None

    def patiently(self, what: str, act: Callable[[], Any], until: float) -> Any:
        """Do what needs Slurm, again with pauses while it does not answer, until `until` (unix s); None if in vain.

        A full queue is not waited for: all nodes would stand idle, and a requeue needs no place in it.
        """
        pause = 1.0
        while True:
            try:
                return act()
            except (SlurmRefused, SlurmFull) as error:
                self.say(f"cannot {what}: {error}")
                return None
            except SlurmError as error:
                if time.time() + pause > until:
                    self.say(f"cannot {what}: {error}")
                    return None
                time.sleep(pause)
                pause = min(15.0, 2 * pause)

    def try_or_say(self, what: str, act: Callable[[], Any]) -> bool:
        """Do what may fail without harm to the verdict; say so if it does."""
        try:
            act()
        except (UserError, OSError) as error:
            if what:
                self.say(f"cannot {what}: {error}")
            return False
        return True

    def say(self, text: str) -> None:
        print(f"{self.stage}: {text}", file=sys.stderr, flush=True)

    def event(self, kind: str, **details: Any) -> None:
        """Note it in events.jsonl, of which nothing that goes on depends."""
        about = {"stage": self.stage, "job_id": self.job_id, "attempt": self.number}
        self.try_or_say(f"note the event {kind!r}", lambda: self.run.event(kind, **about, **details))
