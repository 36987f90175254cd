"""The beginning of an attempt, on the host: may it work, does it own the Run, and who goes on after it?"""

from __future__ import annotations

import os
import time
from dataclasses import replace

from pipeline.errors import EXIT_DONE, EXIT_NOT_READY, EXIT_STOPPED
from pipeline.hints import command
from pipeline.host.allocation import write_allocation
from pipeline.host.attempt import PATIENCE
from pipeline.host.lease import NOTHING_TO_DO, Leaseholder
from pipeline.plan.flags import gpus_of, signal_lead
from pipeline.plan.jobs import ALONE, NEEDS
from pipeline.run.attempts import past_attempts, progress, settle, settle_lost
from pipeline.run.complete import is_complete
from pipeline.run.decision import MOST_FAILURES, PAUSE, Attempt, Decision, may_begin, pause
from pipeline.run.place import place_of
from pipeline.run.records import BeginRecord, JobRecord, SaidRecord
from pipeline.run.saves import check_checkpoints
from pipeline.run.verdict import EXIT_CODES, Verdict
from pipeline.slurm.errors import SlurmError
from pipeline.slurm.jobs import SlurmJob
from pipeline.slurm.time_limits import time_seconds
from pipeline.submit.missing import silent_segments
from pipeline.submit.queue import QueuedJob
from pipeline.submit.run_folder import image_of


class HostBegin(Leaseholder):
    """The questions before an attempt."""

    def begin(self) -> int:
        """Return 0 where this attempt may work, NOTHING_TO_DO, or the code with which the script ends."""
        if self.stage in ALONE:  # a person wants to know about these nodes, whatever came before
            self.note_beginning()
            return EXIT_DONE
        place = place_of(self.run)
        if place.moved or place.copied:  # its launch files name the folder of before
            self.say(
                f"{self.run.root} was {'moved' if place.moved else 'copied'} here from {place.former}. Take it up:"
            )
            self.say(command("resume", self.run.root))
            return EXIT_NOT_READY
        early = may_begin([], complete=is_complete(self.run, self.config, self.stage), stop=self.run.stop.exists())
        if early.action != "go":
            return self.refuse(early)
        if (needs := self.needs()) and not is_complete(self.run, self.config, needs):
            return self.wait_for_input(needs)
        if self.stage == "pretrain":
            check_checkpoints(self.run)  # an error where there were some, and none is there any more
        image_of(self.run, self.cluster)  # an error where the file is another one than the Run was made with
        if code := self.avoid_bad_nodes(self.nodes()):
            return code
        # From here on nothing of another attempt is touched before the Run is this one's.
        if code := self.take_over():
            return code
        lost = settle_lost(self.run, self.stage, self.job_id, self.number, self.part)
        for one in lost:
            self.event("lost", of=f"{one.job_id}.{one.number}", nodes=one.nodes)
        past = past_attempts(self.run, self.stage, self.part)
        decision = may_begin(
            self.since_started(past), complete=False, stop=False, gpu_hours=self.gpu_hours(past),
            most_gpu_hours=self.cluster.max_gpu_hours, tries=self.cluster.max_restarts_without_progress,
        )  # fmt: skip
        if decision.action != "go":
            return self.refuse(decision)
        if lost and self.backs_off(self.since_started(past)):
            return NOTHING_TO_DO
        self.note_beginning()
        if self.stage == "pretrain":
            self.queue_successor()
        return EXIT_DONE

    def needs(self) -> str | None:
        """Return the Stage that must be complete: all training, unless a person has asked for what is there now."""
        on_demand = self.stage != "pretrain" and self.entry is not None and self.entry.role == "alone"
        return None if on_demand else NEEDS.get(self.stage)

    def note_beginning(self, *, dead: list[str] | None = None) -> BeginRecord:
        """Write down what this attempt begins with, and what its script is to know of the nodes."""
        nodes = self.nodes()
        lead = self.entry.signal_lead if self.entry else None
        record = BeginRecord(
            job_id=self.job_id, number=self.number, stage=self.stage, part=self.part, nodes=nodes,
            step_at_start=progress(self.run, self.stage, self.part), time=time.time(), deadline=self.deadline(),
            signal_lead=lead if lead is not None else signal_lead(self.cluster, None), dead=dead,
            environment=self.environment(),
        )  # fmt: skip
        record.write(self.run.beginning(self.job_id, self.number))
        write_allocation(
            self.run.allocation(self.job_id, self.number), self.run.sinfo(self.job_id, self.number), os.environ,
            self.slurm if self.asks else None,
        )  # fmt: skip
        return record

    def deadline(self) -> float:
        """Return when Slurm ends this Job (unix s): by the limit that it gave, which need not be the one asked for."""
        job = self.me()
        if job is not None and job.time_left is not None:
            return time.time() + job.time_left
        told = os.environ.get("SLURM_JOB_END_TIME", "")
        if told.isdecimal():
            return float(told)
        return time.time() + time_seconds(getattr(self.config, self.stage).time)

    def refuse(self, decision: Decision) -> int:
        """End before anything was done: all is done already, or the chain ends here."""
        if decision.action == "skip":
            self.say(f"{decision.reason}, nothing to do")
            if self.stage == "pretrain":
                self.cancel_segments()
            return NOTHING_TO_DO
        self.say(f"does not begin: {decision.reason}")
        self.event("not begun", reason=decision.reason)
        if decision.code == EXIT_CODES[Verdict.NO_PROGRESS]:
            begin = self.note_beginning()
            settle(self.run, begin, SaidRecord(verdict=Verdict.NO_PROGRESS, reason=decision.reason), None)
        if decision.cancel_rest:
            self.cancel_rest()
        return decision.code

    def wait_for_input(self, needs: str) -> int:
        """Leave, since what this Stage reads is not complete; where it still comes, a new Job waits behind it.

        An edge is dropped when Slurm forgets the Job that it names, and a Job by hand has none.
        """
        told = f"{needs} is not complete"
        source = None
        if self.asks and self.entry is not None:
            look = lambda: [q for q in self.queue.alive() if q.is_chain(needs) and q.record.job_id]  # noqa: E731
            alive = self.patiently(f"ask for {needs}", look, time.time() + PATIENCE)
            if alive is None:
                return EXIT_NOT_READY
            source = next((q for q in reversed(alive) if q.waits), alive[-1] if alive else self.train_again(needs))
        if self.entry is None:
            self.say(f"{told}; submit this again when it is")
            return EXIT_STOPPED
        if source is None:
            self.say(
                f"{told}, and nothing is queued that would complete it. Go on with: {command('resume', self.run.root)}"
            )
            self.event("not begun", reason=told)
            return EXIT_STOPPED
        edge = f"afterok:{source.job_id},singleton" if needs == "tokenize" else f"afterany:{source.job_id}"
        role = self.entry.role

        def submit() -> JobRecord:
            return self.queue.submit(self.stage, edge, by=self.name, role=role, since=self.since)

        again = self.patiently("wait for it", submit, time.time() + PATIENCE)
        if again is None:
            return self._wait_itself(edge)
        self.say(f"{told}; job {again.job_id} waits for job {source.job_id} in place of this one")
        self.event("waits again", reason=told, successor=again.job_id)
        return NOTHING_TO_DO

    def train_again(self, needs: str) -> QueuedJob | None:
        """Queue a Segment where the last one died before it could queue its successor, or did not even start.

        A prolog that fails, a node that dies at that moment: then nobody but the Jobs behind training is left to go on.
        """
        if needs != "pretrain" or self.entry is None or self.entry.role != "chain":
            return None
        silent = silent_segments(self.run)
        if not silent:
            return None
        job = self.slurm.jobs([silent[-1]])[silent[-1]]
        # Slurm, too, cancels a Job: one whose prolog fails. That one had nodes.
        if not job.answered or (job.state == "cancelled" and not job.nodes):
            return None
        told = f"job {job.job_id} ended without a word ({job.explain() or job.state})"
        if len(silent) >= MOST_FAILURES:
            self.say(f"{told}, as {len(silent)} did in a row: ask an administrator, or see sacct -j {','.join(silent)}")
            return None
        later = {"begin": f"now+{PAUSE << len(silent) - 2}"} if len(silent) > 1 else {}
        submit = lambda: self.queue.submit("pretrain", "singleton", flags=later, since=self.since, by=self.name)  # noqa: E731
        record = self.patiently("queue a Segment", submit, time.time() + PATIENCE)
        if record is None:
            return None
        self.say(f"{told}; job {record.job_id} goes on")
        self.event("trains again", reason=told, successor=record.job_id)
        return QueuedJob(record, SlurmJob(str(record.job_id), "pending", "sbatch"))

    def _wait_itself(self, edge: str) -> int:
        """Put this very Job back behind what it needs: no other one could be submitted."""
        if not self.requeue():
            return EXIT_NOT_READY
        self.change_requeued(Dependency=edge)
        self.event("requeue", reason=f"waits for {edge}")
        return NOTHING_TO_DO

    def avoid_bad_nodes(self, nodes: list[str]) -> int:
        """Go elsewhere where one of our nodes has failed before; return the script's code, 0 to stay."""
        bad = self.bad_nodes.read()
        here = [bad[name] for name in nodes if name in bad]
        if here and self.asks:
            here = [node for node in here if node.name in self.excluded(self.stage)]
        if not here:
            return EXIT_DONE
        told = ", ".join(f"{node.name} ({node.reason})" for node in here[:8])
        if not self.asks:
            self.say(f"on a node that failed before: {told}; it cannot be left from here")
            return EXIT_DONE
        self.say(f"leaves nodes that failed before: {told}")
        self.event("elsewhere", nodes=[node.name for node in here], reason=told)
        return EXIT_NOT_READY if self.requeue() else EXIT_DONE

    # The successor

    def backs_off(self, past: list[Attempt]) -> bool:
        """Leave for later after an attempt that was killed, and so could not put off its successor, this very Job.

        The first time it is tried again at once: a killed Job is seldom more than a lost node.
        """
        if self.stage != "pretrain" or not past or past[-1].preempted:
            return False
        if not (seconds := min(pause(past), pause(past[:-1]))):  # 0 after one that made a step
            return False
        reason = past[-1].reason
        successor = self.queue_successor()
        if successor is None or not self.put_off(successor, seconds, reason):
            return False
        self.say(f"the attempts before made no step, and the last left no word; waits {seconds} s ({reason})")
        return True

    def queue_successor(self) -> QueuedJob | None:
        """Queue the Job that goes on when this one ends, however it ends. Training does not wait for it to succeed."""
        if not self.asks:
            return None
        quick = replace(self.slurm, timeout=20, pauses=())
        try:
            successor = self.queue.ensure_successor(self.job_id, self.since or time.time(), quick, by=self.name)
        except SlurmError as error:
            self.say(f"no successor is queued yet; it is tried again later: {error}")
            self.event("no successor", reason=str(error).splitlines()[0])
            self.try_or_say("be requeued by Slurm", lambda: self.slurm.update(self.job_id, Requeue="1"))
            return None
        self.say(f"job {successor.job_id} goes on after this one")
        if self.number:  # it was requeued, for which it had to be one that Slurm may requeue by itself
            self.try_or_say("leave it to the successor", lambda: self.slurm.update(self.job_id, Requeue="0"))
        return successor

    def gpu_hours(self, past: list[Attempt]) -> float:
        gpus = gpus_of(self.stage, self.config, self.cluster)
        return sum(attempt.nodes * gpus * attempt.seconds for attempt in past) / 3600
