"""The end of an attempt, on the host: how did it end, and what goes on?"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pipeline.errors import EXIT_DONE
from pipeline.hints import command
from pipeline.host.attempt import PATIENCE
from pipeline.host.lease import NOTHING_TO_DO, Leaseholder
from pipeline.image.container_errors import container_failure
from pipeline.plan.flags import signal_lead
from pipeline.plan.jobs import STAGES
from pipeline.run.attempts import as_attempt, past_attempts, progress, settle, warned_by
from pipeline.run.blame import Fault, blame_of, blamed_nodes, review, was_fine
from pipeline.run.complete import is_complete
from pipeline.run.decision import Attempt, Decision, after_attempt
from pipeline.run.job_ledger import read_ledger
from pipeline.run.owner import current
from pipeline.run.records import BeginRecord, SaidRecord, VerdictRecord, read_record
from pipeline.run.verdict import EXIT_CODES, Verdict, await_owner, how_it_ended, said_of
from pipeline.slurm.launch_errors import nodes_named
from pipeline.slurm.node_lists import few_nodes
from pipeline.slurm.time_limits import time_seconds
from pipeline.submit.queue import QueuedJob

OOM_TEXT = "oom_kill"  # slurmstepd: error: Detected 1 oom_kill event in StepId=...
LOG_TAIL = 1_000_000  # bytes
LEAVE_SECONDS = 15.0  # before the deadline at which nothing is tried again
# The last line of a traceback, or what srun and bash say of a program that is not there.
FIRST_ERROR = re.compile(
    r"^(?:[A-Za-z_][\w.]*(?:Error|Exception|Interrupt)\b.*"
    r"|.*: (?:No such file|command not found|[Pp]ermission denied).*)$",
    re.M,
)


class HostEnd(Leaseholder):
    """What follows from an attempt."""

    def end(self, exit_status: int) -> int:
        """Settle the verdict, do what follows from it, return the script's exit code."""
        if self._is_superseded():
            self.say("another attempt has taken this one's place; nothing more is done here")
            return EXIT_CODES[Verdict.CRASH]
        await_owner(self.run, self.job_id, self.number, self.stage)
        begin = self.beginning()
        past = past_attempts(self.run, self.stage, self.part)
        past = [attempt for attempt in past if (attempt.job_id, attempt.number) != (self.job_id, self.number)]
        said = self.said(exit_status, begin, past)
        verdict = self.settle(begin, said, self.warned(begin), past)
        last = as_attempt(begin, verdict)
        withdrawn = self.review(last, past)
        decision = after_attempt(
            replace(last, blamed=[name for name in last.blamed if name not in withdrawn]), self.since_started(past),
            stage=self.stage, stop=self.run.stop.exists(), tries=self.cluster.max_restarts_without_progress,
        )  # fmt: skip
        if decision.reason:
            self.say(decision.reason)
        if verdict.verdict == Verdict.COMPLETE:
            self._drop_successor()
            self.report()
        if decision.cancel_rest:
            self.cancel_rest()
        if decision.action == "go_on":
            return self._go_on(decision, verdict)
        return decision.code

    def rescue(self, exit_status: int) -> int:
        """See to it that the chain goes on, within the same bounds, where the job script ended before it could ask."""
        if code := self.take_over():
            return EXIT_DONE if code == NOTHING_TO_DO else code
        begin = self.beginning()
        begin.write(self.run.beginning(self.job_id, self.number))
        if said_of(self.run, self.job_id, self.number) is None:
            reason = f"the job script ended with status {exit_status} before its time; see its log"
            said = SaidRecord(verdict=Verdict.ENVIRONMENT, reason=reason, stage=self.stage, time=time.time())
            said.write(self.run.said(self.job_id, self.number))
        return self.end(exit_status)

    def tend(self) -> int:
        """Look, beside training, whether there is still a successor; somebody may have cancelled it."""
        if self._is_superseded() or self.stage != "pretrain" or not self.asks:
            return EXIT_DONE
        self.try_or_say(
            "see to the successor",
            lambda: self.queue.ensure_successor(self.job_id, self.since or time.time(), by=self.name),
        )
        return EXIT_DONE

    def beginning(self) -> BeginRecord:
        """Return what the attempt began with; something like it, where its begin has left nothing."""
        return BeginRecord.read(self.run.beginning(self.job_id, self.number)) or BeginRecord(
            job_id=self.job_id, number=self.number, stage=self.stage, part=self.part, nodes=self.nodes(),
            step_at_start=progress(self.run, self.stage, self.part), time=time.time(),
        )  # fmt: skip

    def settle(
        self,
        begin: BeginRecord,
        said: SaidRecord,
        warned: str | None,
        past: Sequence[Attempt],
        units: int | None = None,
    ) -> VerdictRecord:
        """Write the verdict, with the nodes that are to blame."""
        blame = None
        if said.verdict == Verdict.ENVIRONMENT:
            report = read_record(self.run.preflight(self.job_id, self.number))
            blame = blame_of(said.model_dump(exclude_none=True), report, past, begin.environment)
        verdict = settle(self.run, begin, said, warned, blame=blame, units=units)
        self.run.warned(self.job_id, self.number).unlink(missing_ok=True)
        return verdict

    def review(self, last: Attempt, past: Sequence[Attempt]) -> list[str]:
        """Put the nodes that are to blame on the list; take back what this attempt shows to be no node's fault."""
        blamed, withdrawn = review(last, past)
        if withdrawn:
            self.event("blame taken back", nodes=withdrawn, reason=last.reason)
            self.try_or_say(
                "take nodes off the list of bad ones", lambda: self.bad_nodes.withdraw(withdrawn, str(self.run.root))
            )
        if blamed:
            self._note_bad_nodes(blamed, last.reason)
        return [name for name in last.blamed if name not in blamed]

    def report(self) -> None:
        """Write report.html when the last Stage is complete; whichever Job that is."""
        if not all(is_complete(self.run, self.config, stage) for stage in STAGES):
            return
        from pipeline.report.write import write_report

        try:
            write_report(self.run)
        except Exception as error:  # a chain of weeks must not end as a failure because a picture could not be drawn
            self.say(f"the report could not be written: {error}")

    def _is_superseded(self) -> bool:
        """Tell whether this script lives on, on a node that Slurm has given up, beside a later attempt of its Job.

        What it would do next, requeue or cancel, would hit that one.
        """
        _, holder = current(self.run.owner_of(self.stage, self.job_id))
        if holder is not None and (holder.get("job_id"), holder.get("attempt")) != (self.job_id, self.number):
            return True
        job = self.me()
        return job is not None and self.has_moved_on(job) and job.state == "running"

    def said(self, exit_status: int, begin: BeginRecord, past: Sequence[Attempt]) -> SaidRecord:
        """Return what is known of the end: a rank's word, or what Slurm and the log tell in place of one."""
        said = how_it_ended(self.run, self.job_id, self.number, self.stage, exit_status, from_srun=True)
        log = self._log_tail() if said.verdict == Verdict.CRASH else ""
        unsaid = said_of(self.run, self.job_id, self.number) is None
        if OOM_TEXT in log:
            key = "the cluster file's mem, or pretrain.micro_batch_size"
            reason = f"out of memory (Slurm's oom_kill); change {key}"
            said = said.but(verdict=Verdict.OUT_OF_MEMORY, reason=reason)
        elif unsaid and (named := nodes_named(log)):
            faults = [Fault(node.name, "launch") for node in named]
            blamed = blamed_nodes(faults, self.nodes(), fine_before=was_fine(past, begin.environment))
            told = f"Slurm says of {few_nodes([node.name for node in named])}: {named[0].text}"
            said = said.but(verdict=Verdict.ENVIRONMENT, reason=told, nodes=blamed)
        elif self.cluster.image and (failure := self._container_failure(log, begin, past)):
            said = said.but(**failure)
        elif unsaid and (error := FIRST_ERROR.search(log)):
            said = said.but(reason=f"{said.reason}; first error in its log: {error[0].strip()[:300]}")
        if unsaid:
            self.say(f"{said.verdict}: {said.reason}")
        return said

    def _container_failure(self, log: str, begin: BeginRecord, past: Sequence[Attempt]) -> dict[str, Any] | None:
        fine = was_fine(past, begin.environment)
        return container_failure(log, str(self.cluster.image), self.nodes(), fine_before=fine)

    def _log_tail(self) -> str:
        try:
            with self.run.log(self.stage, self.job_id, self.number).open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_TAIL))
                return file.read().decode(errors="replace")
        except OSError:
            return ""

    def warned(self, begin: BeginRecord) -> str | None:
        """Return what warned this attempt; WARNED_EARLY where it was not its own time limit."""
        limit = begin.time + time_seconds(getattr(self.config, self.stage).time)
        return warned_by(self.run, begin, limit, signal_lead(self.cluster, None))

    def _note_bad_nodes(self, nodes: list[str], reason: str) -> None:
        hours, run = self.cluster.bad_node_hours, str(self.run.root)
        self.try_or_say("put nodes on the list", lambda: self.bad_nodes.add(nodes, reason, hours, run))
        self.event("bad nodes", nodes=nodes, reason=reason)
        for queued in self.others():  # keep the Run's waiting Jobs off them
            self._keep_off(queued.job_id, ",".join(self.excluded(queued.record.stage)))

    def _keep_off(self, job_id: str, names: str) -> None:
        self.try_or_say(f"keep job {job_id} off {names}", lambda: self.slurm.update(job_id, ExcNodeList=names))

    # What goes on

    def _drop_successor(self) -> None:
        """Training is complete: no Segment is needed any more. One that stays finds nothing to do and ends at once."""
        if self.stage == "pretrain" and self.asks:
            self.cancel_segments()

    def _go_on(self, decision: Decision, verdict: VerdictRecord) -> int:
        code = EXIT_DONE if verdict.verdict == Verdict.STOPPED else EXIT_CODES.get(verdict.verdict, 1)
        if self.stage != "pretrain":
            return self._go_on_by_requeue(decision)
        if not self.asks:
            later = self.entry is not None and self._later_segments() > 0
            if not later:
                self.say(f"nothing is queued to go on. Go on with:\n  {command('resume', self.run.root)}")
            return code if later else EXIT_CODES[Verdict.STOPPED]
        successor: QueuedJob | None = self.patiently(
            "queue a successor",
            lambda: self.queue.ensure_successor(self.job_id, self.since or time.time(), by=self.name),
            self._patience(),
        )
        if successor is None:
            return self._go_on_by_requeue(decision)
        self.say(f"job {successor.job_id} goes on")
        if decision.delay:
            self.put_off(successor, decision.delay, decision.reason)
        return code

    def _later_segments(self) -> int:
        mine = self.entry.segment if self.entry else 0
        return sum(r.role == "chain" and r.stage == "pretrain" and r.segment > mine for r in read_ledger(self.run))

    def _patience(self) -> float:
        """Return until when (unix s) Slurm is asked again: the warning's lead is what there is."""
        begin = self.beginning()
        end = begin.deadline or begin.time + time_seconds(getattr(self.config, self.stage).time)
        return min(time.time() + PATIENCE, end - LEAVE_SECONDS)

    def _go_on_by_requeue(self, decision: Decision) -> int:
        if self.requeue():
            self.event("requeue", reason=decision.reason)
            return EXIT_DONE
        self.say(f"this Job could not be requeued. Go on with:\n  {command('resume', self.run.root)}")
        return EXIT_CODES[Verdict.STOPPED]
