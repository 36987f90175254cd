"""Beginning and end of an evaluate attempt, on the host: several run at once, and what is left is handed on."""

from __future__ import annotations

import time

from pipeline.errors import EXIT_DONE, EXIT_NO_PROGRESS, EXIT_NOT_READY, EXIT_STOPPED, UserError
from pipeline.evaluation.backfill import Backfill
from pipeline.evaluation.claims import holders
from pipeline.evaluation.scoring import Left
from pipeline.host.attempt import Host
from pipeline.host.begin import HostBegin
from pipeline.host.end import HostEnd
from pipeline.host.lease import NOTHING_TO_DO
from pipeline.run.attempts import all_attempts, as_attempt, past_attempts
from pipeline.run.complete import is_complete
from pipeline.run.decision import FINAL, may_begin
from pipeline.run.records import read_record, whole
from pipeline.run.verdict import EXIT_CODES, WARNED_EARLY, Verdict, verdict_of
from pipeline.submit.run_folder import image_of


class EvaluateBegin(HostBegin):
    """May this attempt take Units, until when, and whose claims may it take over?"""

    def begin(self) -> int:
        """Return 0 where there are Units to take, else NOTHING_TO_DO or the code with which the script ends."""
        chain = self.entry is not None and self.entry.role == "chain"
        if chain and not is_complete(self.run, self.config, "pretrain") and not self.run.stop.exists():
            return self.wait_for_input("pretrain")
        left = Backfill(self.run, self.config, self.cluster, self.slurm).left()
        decision = may_begin(
            [],
            complete=not left and bool(read_record(self.run.compressors)),
            stop=self.run.stop.exists(),
            gpu_hours=self.gpu_hours(past_attempts(self.run, self.stage)),
            most_gpu_hours=self.cluster.max_gpu_hours,
        )
        if not self.run.checkpoint_steps():  # there was never anything: not that all is done
            self.say(f"{self.run.checkpoints}: no checkpoint to score; pretrain writes it")
            return EXIT_NOT_READY
        if decision.action == "skip":
            self.say("all checkpoints that are there are scored, nothing to do")
            return NOTHING_TO_DO
        if decision.action != "go":
            return self.refuse(decision)
        image_of(self.run, self.cluster)
        if code := self.avoid_bad_nodes(self.nodes()):
            return code
        self.note_beginning(dead=dead_owners(self, left))
        return EXIT_DONE


class EvaluateEnd(HostEnd):
    """Settle the attempt; where Units are left that nobody works on, submit a successor."""

    def end(self, exit_status: int) -> int:
        """Return the script's exit code."""
        begin, units, past = self.beginning(), self._units_done(), past_attempts(self.run, self.stage)
        said = self.said(exit_status, begin, past)
        warned = None
        if self.run.warned(self.job_id, self.number).is_file():
            early = begin.deadline is not None and time.time() < begin.deadline - 60
            warned = WARNED_EARLY if early else "time limit"
        verdict = self.settle(begin, said, warned, past, units)
        self.review(as_attempt(begin, verdict), past)
        if verdict.reason:
            self.say(verdict.reason)
        if verdict.verdict in FINAL or self.run.stop.exists():
            return EXIT_STOPPED if self.run.stop.exists() else EXIT_CODES[verdict.verdict]
        backfill = Backfill(self.run, self.config, self.cluster, self.slurm, by=self.name)
        if is_complete(self.run, self.config, self.stage):
            if self.asks:
                self.try_or_say("cancel what waits", backfill.cancel_pending)
            self.report()
            return EXIT_DONE
        return self._hand_on(backfill, verdict.verdict, units, preempted=warned == WARNED_EARLY)

    def rescue(self, exit_status: int) -> int:
        """Several work at once and none owns the Run, so there is nothing to take over."""
        return self.end(exit_status)

    def _hand_on(self, backfill: Backfill, verdict: str, units: int, *, preempted: bool) -> int:
        code = EXIT_DONE if verdict in (Verdict.COMPLETE, Verdict.STOPPED) else EXIT_CODES.get(verdict, 1)
        if preempted and self.requeue():
            return EXIT_DONE
        left = open_work(self, backfill.left())
        if not left:  # other Jobs are at the rest
            return code
        if not units and not preempted and self._fruitless():
            self.say("no Unit was finished in the last attempts; see their logs")
            return EXIT_NO_PROGRESS
        if not self.asks:
            self.say("Units are left, and nothing is queued to go on")
            return EXIT_STOPPED
        why = f"job {self.job_id} left {len(left.units) + len(left.uncut)} open"
        try:
            backfill.submit(left.seconds, why, ending=self.job_id)
        except UserError as error:
            self.say(f"cannot submit a successor: {error}")
            return EXIT_STOPPED
        return code

    def _units_done(self) -> int:
        """Count the results that this attempt has written."""
        paths = self.run.scores(0).parent.glob("step-*/*.d/[0-9]*.json")
        mine = {"job_id": self.job_id, "attempt": self.number}
        return sum(mine.items() <= read_record(path).items() for path in paths)

    def _fruitless(self) -> bool:
        """Tell whether as many attempts as may be in vain, this one the last, have finished no Unit."""
        tries = self.cluster.max_restarts_without_progress
        verdicts = [one.verdict for one in all_attempts(self.run, self.stage)]
        last = [verdict.units for verdict in verdicts if verdict and verdict.units is not None][-tries:]
        return len(last) >= tries and not any(last)


def dead_owners(host: Host, left: Left) -> list[str]:
    """Return which of the attempts that have claimed open Units are dead: JOB.ATTEMPT.

    As Slurm says; where it may not be asked, those that have left a verdict.
    """
    owners = {(str(holder.get("job_id")), whole(holder.get("attempt")) or 0) for holder in _holders(left)}
    if not host.asks:
        return sorted(f"{job}.{n}" for job, n in owners if verdict_of(host.run, job, n) is not None)
    jobs = host.slurm.jobs([job_id for job_id, _ in owners if job_id.isdecimal()])
    return sorted(
        f"{job_id}.{attempt}"
        for job_id, attempt in owners
        if job_id in jobs and (jobs[job_id].gone or (jobs[job_id].answered and jobs[job_id].restarts > attempt))
    )


def open_work(host: Host, left: Left) -> Left:
    """Return what is left without the Units that living Jobs other than this one have claimed."""
    dead = set(dead_owners(host, left))
    free = []
    for unit in left.units:
        (holder, *_) = holders([unit.claim]) or [{}]
        owner = f"{holder.get('job_id')}.{whole(holder.get('attempt')) or 0}"
        if not holder or owner in dead or holder.get("job_id") == host.job_id:
            free.append(unit)
    share = len(free) / len(left.units) if left.units else 1.0
    return Left(free, left.uncut, left.seconds * share if free or left.uncut else 0.0)


def _holders(left: Left) -> list[dict[str, object]]:
    return holders(unit.claim for unit in left.units)
