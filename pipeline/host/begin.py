"""The beginning of an attempt, on the host: may it work, and does it own the Run?"""

from __future__ import annotations

import re
import sys
import time
from typing import Any

from pipeline.errors import EXIT_DONE, EXIT_NOT_READY
from pipeline.host.attempt import Host
from pipeline.plan.flags import gpus_of
from pipeline.plan.jobs import ALONE
from pipeline.run.attempts import Beginning, progress, read_attempts, settle_lost
from pipeline.run.complete import is_complete
from pipeline.run.decision import Attempt, Decision, may_begin
from pipeline.run.owner import current, take
from pipeline.run.verdict import EXIT_CODES, write_verdict
from pipeline.submit.run_folder import image_of

NOTHING_TO_DO = 100  # told to the script, which ends with 0
ENDING_SECONDS = 90  # that another Job of this Run may take to end; Slurm's KillWait is 30 s by default


class HostBegin(Host):
    """The questions before an attempt."""

    def begin(self) -> int:
        """Return 0 where this attempt may work, NOTHING_TO_DO, or the code with which the script ends."""
        if self.stage in ALONE:  # a person wants to know about these nodes, whatever came before
            self._note_beginning(self.nodes())
            return EXIT_DONE
        lost = settle_lost(self.run, self.stage, self.job_id, self.number, self.part)
        past = read_attempts(self.run, self.stage, self.part)
        for beginning in lost:
            self.event("lost", of=f"{beginning.job_id}.{beginning.number}", nodes=beginning.nodes)
        decision = may_begin(
            self.since_submitted(past),
            complete=is_complete(self.run, self.config, self.stage),
            stop=self.run.stop.exists(),
            gpu_hours=self._gpu_hours(past),
            most_gpu_hours=self.cluster.max_gpu_hours,
            tries=self.cluster.max_restarts_without_progress,
        )
        if decision.action == "skip":
            print(f"{self.stage}: {decision.reason}, nothing to do")
            return NOTHING_TO_DO
        if decision.action == "end":
            return self._refuse(decision)
        image_of(self.run, self.cluster)  # an error where the file is another one than the Run was made with
        nodes = self.nodes()
        if code := self._avoid_bad_nodes(nodes):
            return code
        if code := self._take_over():
            return code
        self._note_beginning(nodes)
        return EXIT_DONE

    def _note_beginning(self, nodes: list[str]) -> None:
        before = progress(self.run, self.stage, self.part)
        Beginning(self.job_id, self.number, self.stage, nodes, before, time.time(), self.part).write(self.run)

    def _refuse(self, decision: Decision) -> int:
        print(f"{self.stage}: does not begin: {decision.reason}", file=sys.stderr)
        self.event("not begun", reason=decision.reason)
        if decision.code == EXIT_CODES["no_progress"]:
            write_verdict(self.run, self.job_id, self.number, self.stage, "no_progress", decision.reason, None)
        if decision.cancel_rest:
            self.cancel_rest()
        return decision.code

    def _avoid_bad_nodes(self, nodes: list[str]) -> int:
        """Go elsewhere where one of our nodes has failed before; return the script's code, 0 to stay."""
        bad = self.bad_nodes.read()
        here = [bad[name] for name in nodes if name in bad]
        if here and self.cluster.nodes_may_submit:
            here = [node for node in here if node.name in self.excluded(self.stage)]
        if not here:
            return EXIT_DONE
        told = ", ".join(f"{node.name} ({node.reason})" for node in here)
        if not self.cluster.nodes_may_submit:
            print(f"{self.stage}: on a node that failed before: {told}; it cannot be left from here", file=sys.stderr)
            return EXIT_DONE
        print(f"{self.stage}: leaves nodes that failed before: {told}", file=sys.stderr)
        self.event("elsewhere", nodes=[node.name for node in here], reason=told)
        return EXIT_NOT_READY if self.requeue() else EXIT_DONE

    def _take_over(self) -> int:
        """Make the Run this attempt's, whoever stands there, once Slurm says that they are gone; else a code."""
        path = self.run.owner_of(self.stage, self.job_id)
        deadline = time.monotonic() + ENDING_SECONDS
        while True:
            _, holder = current(path)
            if holder is None or self._is_gone(holder):
                break
            if time.monotonic() > deadline:
                print(
                    f"{self.stage}: the Run is held by {_holder_text(holder)}, which is still there; end it with: "
                    f"scancel {holder.get('job_id')}",
                    file=sys.stderr,
                )
                return EXIT_NOT_READY
            time.sleep(2)
        former = take(path, self.job_id, self.number)
        if former is not None:
            self.event("take over", former=_holder_text(former))
        return EXIT_DONE

    def _is_gone(self, holder: dict[str, Any]) -> bool:
        """Tell whether Slurm has ended the holder's Job. Its processes may live on: that is what the fence is for."""
        job_id = str(holder.get("job_id", ""))
        if job_id == self.job_id:
            return True  # an earlier attempt of this very Job: Slurm starts one at a time
        if not re.fullmatch(r"[0-9]+(_[0-9]+)?", job_id):
            return False  # a local scheduler or a person: nobody to ask
        job = self.slurm.jobs([job_id])[job_id]
        if job.source == "none":  # squeue knows all that live
            return job.answered
        return job.state not in ("running", "completing", "suspended", "stopped") and not job.state.startswith(
            "unknown"
        )

    def _gpu_hours(self, past: list[Attempt]) -> float:
        gpus = gpus_of(self.stage, self.config, self.cluster)
        return sum(attempt.nodes * gpus * attempt.seconds for attempt in past) / 3600


def _holder_text(holder: dict[str, Any]) -> str:
    return f"job {holder.get('job_id')}, attempt {holder.get('attempt')} on {holder.get('host')}"
