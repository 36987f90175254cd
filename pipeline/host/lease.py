"""The lease of a Run: who may write into it. Slurm's `singleton` comes first; this is the second line."""

from __future__ import annotations

import re
import time
from typing import Any, Literal

from pipeline.errors import EXIT_DONE
from pipeline.host.attempt import Host
from pipeline.run.job_ledger import entry_of, this_user
from pipeline.run.owner import current, is_alive, take, time_of_files
from pipeline.run.records import JobRecord
from pipeline.run.verdict import verdict_of

NOTHING_TO_DO = 100  # told to the script, which ends with 0
ENDING_SECONDS = 90  # that another Job of this Run may take to end; Slurm's KillWait is 30 s by default
SILENCE_SECONDS = 900.0  # after which a holder that nobody can be asked about is taken to be gone
LOOK_SECONDS = 2.0
HolderState = Literal["gone", "ending", "alive", "unknown"]


class Leaseholder(Host):
    """An attempt that takes the Run over, and leaves it alone while another one lives."""

    def take_over(self) -> int:
        """Make the Run this attempt's, once whoever holds it is gone; leave at once where the holder lives."""
        path = self.run.owner_of(self.stage, self.job_id)
        deadline = time.monotonic() + ENDING_SECONDS
        while True:
            _, holder = current(path)
            state = "gone" if holder is None else self._holder_state(holder)
            if state == "gone":
                break
            if state == "alive" or time.monotonic() > deadline:
                return self._leave_to(holder or {})
            time.sleep(LOOK_SECONDS)
        former = take(path, self.job_id, self.number)
        if former is not None:
            self.event("take over", former=_holder_text(former))
        return EXIT_DONE

    def _holder_state(self, holder: dict[str, Any]) -> HolderState:
        """Tell whether the holder's attempt is over. Its processes may live on: that is what the fence is for."""
        job_id = str(holder.get("job_id", ""))
        if job_id == self.job_id:  # Slurm starts one attempt of a Job at a time: a later one has this one's place
            return "gone" if int(holder.get("attempt") or 0) <= self.number else "alive"
        if not re.fullmatch(r"[0-9]+(_[0-9]+)?", job_id):  # a local scheduler or a person: nobody to ask
            return "alive" if is_alive(holder) else "gone" if holder.get("pid") else "unknown"
        entry = entry_of(self.run, job_id)
        if not self.asks:
            return self._unasked_state(holder, entry)
        another = entry is not None and entry.user not in ("", this_user())  # whose Jobs may be hidden from this user
        job = self.slurm.jobs([job_id], others=[job_id] if another else ())[job_id]
        if not job.answered:
            # A successor is started by Slurm after its predecessor has ended, and never beside it.
            return "gone" if self._comes_after(entry) else "unknown"
        if job.gone or (entry is not None and self.cluster.job_mark == "comment" and job.comment != entry.token):
            return "gone"  # with another token it is somebody's Job that was given the same id
        if job.state == "completing":
            return "ending"
        return "gone" if job.state in ("pending", "requeued", "requeue_hold") else "alive"

    def _unasked_state(self, holder: dict[str, Any], entry: JobRecord | None) -> HolderState:
        """Tell the same where no command of Slurm's may be called: by the chain's order, else by signs of life."""
        job_id, number = str(holder.get("job_id")), int(holder.get("attempt") or 0)
        if self._comes_after(entry) or verdict_of(self.run, job_id, number) is not None:
            return "gone"
        signs = [*self.run.attempt(job_id, number).glob("*"), self.run.log(self.stage, job_id, number)]
        last = max((path.stat().st_mtime for path in signs if path.exists()), default=0.0)
        return "alive" if time_of_files(self.run.owner) - last < SILENCE_SECONDS else "gone"

    def _comes_after(self, entry: JobRecord | None) -> bool:
        """Tell whether Slurm's own rule says that the Job of `entry` has ended: this one waited for it."""
        mine = self.entry
        if mine is None or entry is None or self.stage != "pretrain" or entry.stage != "pretrain":
            return False
        return "singleton" in mine.dependency and (mine.number, mine.segment) > (entry.number, entry.segment)

    def _leave_to(self, holder: dict[str, Any]) -> int:
        """Leave the Run to an attempt that lives, and see to it that the chain goes on after that one."""
        told = _holder_text(holder)
        self.say(f"the Run is worked on by {told}; this job leaves it alone")
        self.event("left alone", holder=told)
        job_id = str(holder.get("job_id", ""))
        if self.stage == "pretrain" and self.asks and job_id.isdecimal():
            entry = entry_of(self.run, job_id)
            since = (entry.since or entry.submitted) if entry else time.time()
            self.try_or_say(
                "see to its successor",
                lambda: self.queue.ensure_successor(job_id, since, by=self.name, but=self.job_id),
            )
        return NOTHING_TO_DO


def _holder_text(holder: dict[str, Any]) -> str:
    return f"job {holder.get('job_id')}, attempt {holder.get('attempt')} on {holder.get('host') or 'its nodes'}"
