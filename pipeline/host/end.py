"""The end of an attempt, on the host: how did it end, and what goes on?"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Sequence
from typing import Any

from pipeline.errors import EXIT_DONE
from pipeline.hints import command
from pipeline.host.attempt import Host
from pipeline.image.container_errors import container_failure
from pipeline.plan.flags import signal_lead
from pipeline.plan.jobs import STAGES
from pipeline.run.attempts import Beginning, progress, read_attempts, read_beginning, settle
from pipeline.run.blame import blame_of, review, was_fine
from pipeline.run.complete import is_complete
from pipeline.run.decision import Attempt, Decision, after_attempt
from pipeline.run.owner import current
from pipeline.run.records import read_record
from pipeline.run.verdict import (
    COMPLETE,
    CRASH,
    ENVIRONMENT,
    EXIT_CODES,
    OUT_OF_MEMORY,
    WARNED_EARLY,
    await_owner,
    read_verdict,
)
from pipeline.slurm.errors import SlurmError
from pipeline.slurm.time_limits import time_seconds
from pipeline.submit.run_folder import read_jobs

OOM_TEXT = "oom_kill"  # slurmstepd: error: Detected 1 oom_kill event in StepId=...
LOG_TAIL = 1_000_000  # bytes
# The last line of a traceback, or what srun and bash say of a program that is not there.
FIRST_ERROR = re.compile(
    r"^(?:[A-Za-z_][\w.]*(?:Error|Exception|Interrupt)\b.*"
    r"|.*: (?:No such file|command not found|[Pp]ermission denied).*)$",
    re.M,
)


class HostEnd(Host):
    """What follows from an attempt."""

    def end(self, exit_status: int) -> int:
        """Settle the verdict, do what follows from it, return the script's exit code."""
        if self._is_superseded():
            print(
                f"{self.stage}: another attempt has taken this one's place; nothing more is done here", file=sys.stderr
            )
            return EXIT_CODES["crash"]
        await_owner(self.run, self.job_id, self.number, self.stage)
        beginning = read_beginning(self.run, self.job_id, self.number) or Beginning(
            self.job_id, self.number, self.stage, self.nodes(), progress(self.run, self.stage, self.part), time.time(),
            self.part,
        )  # fmt: skip
        warned = self._warned(beginning)
        earlier = self.since_submitted(read_attempts(self.run, self.stage, self.part))
        past = [attempt for attempt in earlier if (attempt.job_id, attempt.number) != (self.job_id, self.number)]
        record = self._verdict(exit_status, past)
        last = settle(self.run, beginning, record, warned)
        self.run.warned(self.job_id, self.number).unlink(missing_ok=True)
        self._note_bad_nodes(last, past)
        following = self._following()
        decision = after_attempt(
            last,
            past,
            stage=self.stage,
            stop=self.run.stop.exists(),
            tries=self.cluster.max_restarts_without_progress,
        )
        if decision.reason:
            print(f"{self.stage}: {decision.reason}", file=sys.stderr)
        if last.verdict == COMPLETE and following:
            self._point_dependants_here(following)
        if last.verdict == COMPLETE:
            self._report()
        if decision.cancel_rest:
            self.cancel_rest()
        if decision.action == "go_on" and not following:
            return self._go_on_by_requeue(decision)
        return decision.code

    def _report(self) -> None:
        """Write report.html when the last Stage is complete; whichever Job that is."""
        if not all(is_complete(self.run, self.config, stage) for stage in STAGES):
            return
        from pipeline.report.write import write_report

        try:
            write_report(self.run)
        except Exception as error:  # a chain of weeks must not end as a failure because a picture could not be drawn
            print(f"{self.stage}: the report could not be written: {error}", file=sys.stderr)

    def _is_superseded(self) -> bool:
        """Tell whether this script lives on, on a node that Slurm has given up, beside a later attempt of its Job.

        What it would do next, requeue or cancel, would hit that one.
        """
        _, holder = current(self.run.owner_of(self.stage, self.job_id))
        if holder is not None and (holder.get("job_id"), holder.get("attempt")) != (self.job_id, self.number):
            return True
        try:
            job = self.slurm.jobs([self.job_id])[self.job_id]
        except SlurmError:
            return False
        return self.has_moved_on(job) and job.state == "running"

    def _verdict(self, exit_status: int, past: Sequence[Attempt] = ()) -> dict[str, Any]:
        record = read_verdict(self.run, self.job_id, self.number, self.stage, exit_status, from_srun=True)
        log = self._log_tail() if record["verdict"] == CRASH else ""
        if OOM_TEXT in log:
            key = "the cluster file's mem, or pretrain.micro_batch_size"
            record = record | {"verdict": OUT_OF_MEMORY, "reason": f"out of memory (Slurm's oom_kill); change {key}"}
        elif self.cluster.image and (
            failure := container_failure(log, self.cluster.image, self.nodes(), fine_before=was_fine(past, ""))
        ):
            record = record | failure
        elif (error := FIRST_ERROR.search(log)) and not self.run.verdict(self.job_id, self.number).is_file():
            record = record | {"reason": f"{record['reason']}; first error in its log: {error[0].strip()[:300]}"}
        if not self.run.verdict(self.job_id, self.number).is_file():
            print(f"{record['verdict']}: {record['reason']}", file=sys.stderr)
        if record["verdict"] == ENVIRONMENT:
            blame = blame_of(record, read_record(self.run.preflight(self.job_id, self.number)), past, "")
            record = record | {"nodes": blame.nodes, "sure": blame.sure}
        return record

    def _log_tail(self) -> str:
        try:
            with self.run.log(self.stage, self.job_id, self.number).open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_TAIL))
                return file.read().decode(errors="replace")
        except OSError:
            return ""

    def _warned(self, beginning: Beginning) -> str | None:
        """Return what warned this attempt; WARNED_EARLY where it was not its own time limit."""
        if not self.run.warned(self.job_id, self.number).is_file():
            return None
        limit = time_seconds(getattr(self.config, self.stage).time)
        # A warning comes up to 60 s before its time.
        due = beginning.time + limit - signal_lead(self.cluster, None) - 120
        return WARNED_EARLY if time.time() < due else "time limit"

    def _note_bad_nodes(self, last: Attempt, past: Sequence[Attempt]) -> None:
        blamed, withdrawn = review(last, past)
        if withdrawn:
            self.bad_nodes.withdraw(withdrawn, str(self.run.root))
            self.event("bad nodes withdrawn", nodes=withdrawn, reason=f"other nodes fail like them: {last.reason}")
        if last.verdict == ENVIRONMENT and blamed:
            self.bad_nodes.add(blamed, last.reason, self.cluster.bad_node_hours, str(self.run.root))
            self.event("bad nodes", nodes=blamed, reason=last.reason)
            if self.cluster.nodes_may_submit:
                self._exclude_from_pending()

    def _exclude_from_pending(self) -> None:
        """Keep the Run's waiting Jobs off the bad nodes."""
        stages = {str(job.get("job_id")): str(job["stage"]) for job in read_jobs(self.run)["jobs"]}
        for job in self.others("pending"):
            names = ",".join(self.excluded(stages[job]))
            self.attempt(
                f"keep job {job} off {names}",
                lambda job=job, names=names: self.slurm.update(job, ExcNodeList=names),
            )

    def _following(self) -> list[str]:
        """List the later Segments of this Stage that wait, the next one first."""
        records = read_jobs(self.run)["jobs"]
        mine = next((job for job in records if str(job.get("job_id")) == self.job_id), None)
        if mine is None or not mine.get("segment"):
            return []
        waiting = set(self.others("pending"))
        later = [job for job in records if job["stage"] == self.stage and job["segment"] > mine["segment"]]
        return [str(job["job_id"]) for job in later if str(job.get("job_id")) in waiting]

    def _point_dependants_here(self, leftovers: list[str]) -> None:
        """Training is complete early: let what waits for the last Segment wait for this one, drop those between.

        Where nodes may not call scontrol, the Segments left over find nothing to do and end in a second.
        """
        if not self.cluster.nodes_may_submit:
            return
        waiting = set(self.others("pending"))
        for job in read_jobs(self.run)["jobs"]:
            job_id = str(job.get("job_id"))
            after = str(job.get("dependency") or "")
            if job_id in waiting and job["stage"] != self.stage and any(f":{left}" in after for left in leftovers):
                self.attempt(
                    f"let job {job_id} wait for this one",
                    lambda job_id=job_id: self.slurm.update(job_id, Dependency=f"afterok:{self.job_id}"),
                )
        self.attempt(f"cancel {', '.join(leftovers)}", lambda: self.slurm.cancel(leftovers))

    def _go_on_by_requeue(self, decision: Decision) -> int:
        if self.cluster.nodes_may_submit and self.requeue():
            self.event("requeue", reason=decision.reason)
            return EXIT_DONE
        print(f"{self.stage}: this Job could not be requeued. Go on with:\n  {command('resume', self.run.root)}")
        return EXIT_CODES["stopped"]
