"""Beginning and end of an evaluate attempt, on the host: several run at once, and what is left is handed on."""

from __future__ import annotations

import sys
import time

from pipeline.errors import EXIT_DONE, EXIT_NO_PROGRESS, EXIT_NOT_READY, EXIT_STOPPED, UserError
from pipeline.evaluation.backfill import Backfill
from pipeline.evaluation.claims import holders
from pipeline.evaluation.scoring import Left
from pipeline.host.begin import NOTHING_TO_DO, HostBegin
from pipeline.host.end import HostEnd
from pipeline.run.attempts import Beginning, newest_step, read_attempts, read_beginning, settle
from pipeline.run.complete import is_complete
from pipeline.run.decision import FINAL, may_begin
from pipeline.run.records import read_record, read_verdicts, whole
from pipeline.run.verdict import COMPLETE, EXIT_CODES, STOPPED, WARNED_EARLY
from pipeline.slurm.commands import Slurm
from pipeline.submit.run_folder import image_of


class EvaluateBegin(HostBegin):
    """May this attempt take Units, until when, and whose claims may it follow?"""

    def begin(self) -> int:
        """Return 0 where there are Units to take, else NOTHING_TO_DO or the code with which the script ends."""
        backfill = Backfill(self.run, self.config, self.cluster, self.slurm)
        left = backfill.left()
        decision = may_begin(
            [],
            complete=not left and bool(read_record(self.run.compressors)),
            stop=self.run.stop.exists(),
            gpu_hours=self._gpu_hours(read_attempts(self.run, self.stage)),
            most_gpu_hours=self.cluster.max_gpu_hours,
        )
        if not self.run.checkpoint_steps():  # there was never anything: not that all is done
            print(f"{self.stage}: {self.run.checkpoints}: no checkpoint to score; pretrain writes it", file=sys.stderr)
            return EXIT_NOT_READY
        if decision.action == "skip":
            print(f"{self.stage}: all checkpoints that are there are scored, nothing to do")
            return NOTHING_TO_DO
        if decision.action == "end":
            return self._refuse(decision)
        image_of(self.run, self.cluster)
        nodes = self.nodes()
        if code := self._avoid_bad_nodes(nodes):
            return code
        job = self.slurm.jobs([self.job_id])[self.job_id]
        deadline = time.time() + job.time_left if job.time_left is not None else None
        Beginning(
            self.job_id, self.number, self.stage, nodes, newest_step(self.run), time.time(),
            deadline=deadline, dead=dead_owners(self.slurm, left),
        ).write(self.run)  # fmt: skip
        return EXIT_DONE


class EvaluateEnd(HostEnd):
    """Settle the attempt; where Units are left that nobody works on, submit a successor."""

    def end(self, exit_status: int) -> int:
        """Return the script's exit code."""
        beginning = read_beginning(self.run, self.job_id, self.number) or Beginning(
            self.job_id, self.number, self.stage, self.nodes(), newest_step(self.run), time.time()
        )
        units = self._units_done()
        record = self._verdict(exit_status) | {"units": units}
        warned = None
        if self.run.warned(self.job_id, self.number).is_file():
            early = beginning.deadline is not None and time.time() < beginning.deadline - 60
            warned = WARNED_EARLY if early else "time limit"
        settle(self.run, beginning, record, warned)
        self.run.warned(self.job_id, self.number).unlink(missing_ok=True)
        self._note_bad_nodes(record)
        verdict, reason = str(record["verdict"]), str(record["reason"])
        if reason:
            print(f"{self.stage}: {reason}", file=sys.stderr)
        if verdict in FINAL or self.run.stop.exists():
            return EXIT_STOPPED if self.run.stop.exists() else EXIT_CODES[verdict]
        backfill = Backfill(self.run, self.config, self.cluster, self.slurm)
        if is_complete(self.run, self.config, self.stage):
            self.attempt("cancel what waits", backfill.cancel_pending)
            self._report()
            return EXIT_DONE
        return self._hand_on(backfill, verdict, units, preempted=warned == WARNED_EARLY)

    def _hand_on(self, backfill: Backfill, verdict: str, units: int, *, preempted: bool) -> int:
        code = EXIT_DONE if verdict in (COMPLETE, STOPPED) else EXIT_CODES.get(verdict, 1)
        if preempted and self.requeue():
            return EXIT_DONE
        left = open_work(self.slurm, backfill.left(), self.job_id)
        if not left:  # other Jobs are at the rest
            return code
        if not units and not preempted and self._fruitless():
            print(f"{self.stage}: no Unit was finished in the last attempts; see their logs", file=sys.stderr)
            return EXIT_NO_PROGRESS
        if not self.cluster.nodes_may_submit:
            print(f"{self.stage}: Units are left, and nothing is queued to go on", file=sys.stderr)
            return EXIT_STOPPED
        try:
            why = f"job {self.job_id} left {len(left.units) + len(left.uncut)} open"
            backfill.submit(left.seconds, why, ending=self.job_id)
        except UserError as error:
            print(f"{self.stage}: cannot submit a successor: {error}", file=sys.stderr)
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
        records = [record for record in read_verdicts(self.run) if record.get("stage") == self.stage]
        last = [units for record in records if (units := whole(record.get("units"))) is not None][-tries:]
        return len(last) >= tries and not any(last)


def dead_owners(slurm: Slurm, left: Left) -> list[str]:
    """Return which of the attempts that have claimed open Units are dead, as Slurm says: JOB.ATTEMPT."""
    owners = {(str(holder.get("job_id")), whole(holder.get("attempt")) or 0) for holder in _holders(left)}
    ids = [job_id for job_id, _ in owners if job_id.isdecimal()]
    jobs = slurm.jobs(ids)
    gone = {job_id for job_id, job in jobs.items() if job.ended or (job.state == "unknown" and job.answered)}
    return sorted(
        f"{job_id}.{attempt}"
        for job_id, attempt in owners
        if job_id in gone or (job_id in jobs and jobs[job_id].answered and jobs[job_id].restarts > attempt)
    )


def open_work(slurm: Slurm, left: Left, but: str) -> Left:
    """Return what is left without the Units that living Jobs other than `but` have claimed."""
    dead = set(dead_owners(slurm, left))
    free = []
    for unit in left.units:
        (holder, *_) = holders([unit.claim]) or [{}]
        owner = f"{holder.get('job_id')}.{whole(holder.get('attempt')) or 0}"
        if not holder or owner in dead or holder.get("job_id") == but:
            free.append(unit)
    share = len(free) / len(left.units) if left.units else 1.0
    return Left(free, left.uncut, left.seconds * share if free or left.uncut else 0.0)


def _holders(left: Left) -> list[dict[str, object]]:
    return holders(unit.claim for unit in left.units)
