"""What a job script asks on the host, outside the container: `python -m pipeline.jobscript begin|end RUN STAGE JOB N`.

Begin: may this attempt work, and does it own the Run? End: how did it end, and what goes on? Both ask Slurm, which the
container cannot. Their exit codes become the script's.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

from pipeline.attempts import Beginning, newest_step, read_attempts, read_beginning, settle, settle_lost
from pipeline.bad_nodes import BadNodes, bad_nodes_of
from pipeline.cluster import Cluster
from pipeline.complete import is_complete
from pipeline.config import Config
from pipeline.config_load import load_run_config
from pipeline.decision import Attempt, Decision, after_attempt, may_begin
from pipeline.errors import EXIT_DONE, EXIT_NOT_READY, EXIT_STORAGE, EXIT_USAGE, UserError
from pipeline.flags import gpus_of, signal_lead
from pipeline.hints import command
from pipeline.owner import current, take
from pipeline.plan import ALONE, STAGES
from pipeline.records import read_record
from pipeline.run import Run
from pipeline.slurm import Slurm
from pipeline.slurm_errors import SlurmError
from pipeline.slurm_jobs import SlurmJob
from pipeline.slurm_time import time_seconds
from pipeline.submit import read_cluster, read_jobs
from pipeline.verdict import (
    COMPLETE,
    CRASH,
    ENVIRONMENT,
    EXIT_CODES,
    OUT_OF_MEMORY,
    WARNED_EARLY,
    await_owner,
    read_verdict,
    say,
    write_verdict,
)

NOTHING_TO_DO = 100  # told to the script, which ends with 0
ENDING_SECONDS = 90  # that another Job of this Run may take to end; Slurm's KillWait is 30 s by default
EXCLUDE_SECONDS = 20
OOM_TEXT = "oom_kill"  # slurmstepd: error: Detected 1 oom_kill event in StepId=...
LOG_TAIL = 1_000_000  # bytes
# The last line of a traceback, or what srun and bash say of a program that is not there.
FIRST_ERROR = re.compile(
    r"^(?:[A-Za-z_][\w.]*(?:Error|Exception|Interrupt)\b.*"
    r"|.*: (?:No such file|command not found|[Pp]ermission denied).*)$",
    re.M,
)


class Host:
    """One attempt of a Job, seen from the batch shell."""

    def __init__(self, run: Run, stage: str, job_id: str, number: int) -> None:
        self.run, self.stage, self.job_id, self.number = run, stage, job_id, number
        self.config: Config = load_run_config(run.config)
        self.cluster: Cluster = read_cluster(run)
        self.slurm = Slurm()

    @property
    def bad_nodes(self) -> BadNodes:
        return bad_nodes_of(self.run, self.cluster)

    # Begin

    def begin(self) -> int:
        """Return 0 where this attempt may work, NOTHING_TO_DO, or the code with which the script ends."""
        if self.stage in ALONE:  # a person wants to know about these nodes, whatever came before
            Beginning(self.job_id, self.number, self.stage, self._nodes(), newest_step(self.run), time.time()).write(
                self.run
            )
            return EXIT_DONE
        lost = settle_lost(self.run, self.stage, self.job_id, self.number)
        past = read_attempts(self.run, self.stage)
        for beginning in lost:
            self._event("lost", of=f"{beginning.job_id}.{beginning.number}", nodes=beginning.nodes)
        decision = may_begin(
            past,
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
        nodes = self._nodes()
        if code := self._avoid_bad_nodes(nodes):
            return code
        if code := self._take_over():
            return code
        Beginning(self.job_id, self.number, self.stage, nodes, newest_step(self.run), time.time()).write(self.run)
        return EXIT_DONE

    def _refuse(self, decision: Decision) -> int:
        print(f"{self.stage}: does not begin: {decision.reason}", file=sys.stderr)
        self._event("not begun", reason=decision.reason)
        if decision.code == EXIT_CODES["no_progress"]:
            write_verdict(self.run, self.job_id, self.number, self.stage, "no_progress", decision.reason, None)
        if decision.cancel_rest:
            self._cancel_rest()
        return decision.code

    def _nodes(self) -> list[str]:
        return self.slurm.hostnames(os.environ.get("SLURM_JOB_NODELIST", "")) or [os.uname().nodename]

    def _avoid_bad_nodes(self, nodes: list[str]) -> int:
        """Go elsewhere where one of our nodes has failed before; return the script's code, 0 to stay."""
        bad = self.bad_nodes.read()
        here = [bad[name] for name in nodes if name in bad]
        if not here:
            return EXIT_DONE
        told = ", ".join(f"{node.name} ({node.reason})" for node in here)
        if not self.cluster.nodes_may_submit:
            print(f"{self.stage}: on a node that failed before: {told}; it cannot be left from here", file=sys.stderr)
            return EXIT_DONE
        print(f"{self.stage}: leaves nodes that failed before: {told}", file=sys.stderr)
        self._event("elsewhere", nodes=[node.name for node in here], reason=told)
        return EXIT_NOT_READY if self._requeue(sorted(bad)) else EXIT_DONE

    def _take_over(self) -> int:
        """Make the Run this attempt's, whoever stands there, once Slurm says that they are gone; else a code."""
        path = self.run.owner_of(self.stage)
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
            self._event("take over", former=_holder_text(former))
        return EXIT_DONE

    def _is_gone(self, holder: dict[str, Any]) -> bool:
        """Tell whether Slurm has ended the holder's Job. Its processes may live on: that is what the fence is for."""
        job_id = str(holder.get("job_id", ""))
        if job_id == self.job_id:
            return True  # an earlier attempt of this very Job: Slurm starts one at a time
        if not job_id.isdigit():
            return False  # a local scheduler or a person: nobody to ask
        job = self.slurm.jobs([job_id])[job_id]
        return job.state not in ("running", "completing", "suspended", "stopped") and not job.state.startswith(
            "unknown"
        )

    def _gpu_hours(self, past: list[Attempt]) -> float:
        gpus = gpus_of(self.stage, self.config, self.cluster)
        return sum(attempt.nodes * gpus * attempt.seconds for attempt in past) / 3600

    # End

    def end(self, exit_status: int) -> int:
        """Settle the verdict, do what follows from it, return the script's exit code."""
        if self._is_superseded():
            print(
                f"{self.stage}: another attempt has taken this one's place; nothing more is done here", file=sys.stderr
            )
            return EXIT_CODES["crash"]
        await_owner(self.run, self.job_id, self.number, self.stage)
        beginning = read_beginning(self.run, self.job_id, self.number) or Beginning(
            self.job_id, self.number, self.stage, self._nodes(), newest_step(self.run), time.time()
        )
        record = self._verdict(exit_status)
        warned = self._warned(beginning)
        past = [a for a in read_attempts(self.run, self.stage) if (a.job_id, a.number) != (self.job_id, self.number)]
        last = settle(self.run, beginning, record, warned)
        self.run.warned(self.job_id, self.number).unlink(missing_ok=True)
        self._note_bad_nodes(record)
        following = self._following()
        decision = after_attempt(
            last,
            past,
            stage=self.stage,
            stop=self.run.stop.exists(),
            next_queued=bool(following),
            may_requeue=self.cluster.nodes_may_submit,
            tries=self.cluster.max_restarts_without_progress,
        )
        if decision.reason:
            print(f"{self.stage}: {decision.reason}", file=sys.stderr)
        if last.verdict == COMPLETE and following:
            self._point_dependants_here(following)
        if last.verdict == COMPLETE:
            self._report()
        if decision.cancel_rest:
            self._cancel_rest()
        if decision.action == "requeue":
            return self._go_on_by_requeue(decision)
        return decision.code

    def _report(self) -> None:
        """Write report.html when the last Stage is complete; whichever Job that is."""
        if not all(is_complete(self.run, self.config, stage) for stage in STAGES):
            return
        from pipeline.report import write_report

        try:
            write_report(self.run)
        except Exception as error:  # a chain of weeks must not end as a failure because a picture could not be drawn
            print(f"{self.stage}: the report could not be written: {error}", file=sys.stderr)

    def _is_superseded(self) -> bool:
        """Tell whether this script lives on, on a node that Slurm has given up, beside a later attempt of its Job.

        What it would do next, requeue or cancel, would hit that one.
        """
        _, holder = current(self.run.owner_of(self.stage))
        if holder is not None and (holder.get("job_id"), holder.get("attempt")) != (self.job_id, self.number):
            return True
        try:
            job = self.slurm.jobs([self.job_id])[self.job_id]
        except SlurmError:
            return False
        return self._has_moved_on(job) and job.state == "running"

    def _has_moved_on(self, job: SlurmJob) -> bool:
        """Tell whether Slurm has given this Job another attempt; it counts one when it requeues, before it starts."""
        return job.restarts > self.number

    def _verdict(self, exit_status: int) -> dict[str, Any]:
        record = read_verdict(self.run, self.job_id, self.number, self.stage, exit_status, from_srun=True)
        log = self._log_tail() if record["verdict"] == CRASH else ""
        if OOM_TEXT in log:
            key = "the cluster file's mem, or pretrain.micro_batch_size"
            record = record | {"verdict": OUT_OF_MEMORY, "reason": f"out of memory (Slurm's oom_kill); change {key}"}
        elif (error := FIRST_ERROR.search(log)) and not self.run.verdict(self.job_id, self.number).is_file():
            record = record | {"reason": f"{record['reason']}; first error in its log: {error[0].strip()[:300]}"}
        if not self.run.verdict(self.job_id, self.number).is_file():
            print(f"{record['verdict']}: {record['reason']}", file=sys.stderr)
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

    def _note_bad_nodes(self, record: dict[str, Any]) -> None:
        nodes = [str(name) for name in record.get("nodes") or []]
        if record["verdict"] == ENVIRONMENT and nodes:
            self.bad_nodes.add(nodes, str(record["reason"]), self.cluster.bad_node_hours, str(self.run.root))
            self._event("bad nodes", nodes=nodes, reason=record["reason"])
            self._exclude_from_pending()

    def _exclude_from_pending(self) -> None:
        """Keep the Run's waiting Jobs off the bad nodes."""
        names = ",".join(sorted(self.bad_nodes.read()))
        for job in self._others("pending"):
            self._try(f"keep job {job} off {names}", lambda job=job: self.slurm.update(job, ExcNodeList=names))

    def _others(self, *states: str) -> list[str]:
        """List the Run's other Jobs that are in one of `states`, dependants first."""
        ids = [str(job["job_id"]) for job in read_jobs(self.run)["jobs"] if job.get("job_id")]
        ids = [job_id for job_id in ids if job_id != self.job_id]
        if not ids:
            return []
        try:
            found = self.slurm.jobs(ids)
        except SlurmError as error:
            print(f"{self.stage}: {error}", file=sys.stderr)
            return []
        return [job_id for job_id in reversed(ids) if found[job_id].state in states]

    def _following(self) -> list[str]:
        """List the later Segments of this Stage that wait, the next one first."""
        records = read_jobs(self.run)["jobs"]
        mine = next((job for job in records if str(job.get("job_id")) == self.job_id), None)
        if mine is None or not mine.get("segment"):
            return []
        waiting = set(self._others("pending"))
        later = [job for job in records if job["stage"] == self.stage and job["segment"] > mine["segment"]]
        return [str(job["job_id"]) for job in later if str(job.get("job_id")) in waiting]

    def _point_dependants_here(self, leftovers: list[str]) -> None:
        """Training is complete early: let what waits for the last Segment wait for this one, drop those between.

        Where nodes may not call scontrol, the Segments left over find nothing to do and end in a second.
        """
        if not self.cluster.nodes_may_submit:
            return
        waiting = set(self._others("pending"))
        for job in read_jobs(self.run)["jobs"]:
            job_id = str(job.get("job_id"))
            after = str(job.get("dependency") or "")
            if job_id in waiting and job["stage"] != self.stage and any(f":{left}" in after for left in leftovers):
                self._try(
                    f"let job {job_id} wait for this one",
                    lambda job_id=job_id: self.slurm.update(job_id, Dependency=f"afterok:{self.job_id}"),
                )
        self._try(f"cancel {', '.join(leftovers)}", lambda: self.slurm.cancel(leftovers))

    def _cancel_rest(self) -> None:
        """Cancel the Run's waiting Jobs: what they wait for will not come."""
        waiting = self._others("pending", "requeue_hold")
        if waiting and self.cluster.nodes_may_submit:
            self._try(f"cancel {', '.join(waiting)}", lambda: self.slurm.cancel(waiting))

    def _go_on_by_requeue(self, decision: Decision) -> int:
        if self._requeue(sorted(self.bad_nodes.read())):
            self._event("requeue", reason=decision.reason)
            return EXIT_DONE
        print(f"{self.stage}: this Job could not be requeued. Go on with:\n  {command('resume', self.run.root)}")
        return EXIT_CODES["stopped"]

    def _requeue(self, exclude: list[str]) -> bool:
        """Put this very Job back into the queue, away from some nodes; Slurm then ends the script with SIGTERM."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            job = self.slurm.jobs([self.job_id])[self.job_id]
        except SlurmError:
            job = None
        if job is not None and (self._has_moved_on(job) or job.state in ("pending", "requeued", "preempted")):
            return True  # Slurm has done so by itself, as on preemption; once more would hit the next attempt
        if job is not None and job.state == "completing":
            return False  # cancelled by a person, or killed at its time limit
        if not self._try("requeue this job", lambda: self.slurm.requeue(self.job_id)):
            return False
        deadline = time.monotonic() + EXCLUDE_SECONDS
        while exclude and time.monotonic() < deadline:  # refused until the job has left its nodes
            if self._try("", lambda: self.slurm.update(self.job_id, ExcNodeList=",".join(exclude))):
                break
            time.sleep(0.5)
        return True

    def _try(self, what: str, act: Any) -> bool:
        """Do what may fail without harm to the verdict; say so if it does."""
        try:
            act()
        except UserError as error:
            if what:
                print(f"{self.stage}: cannot {what}: {error}", file=sys.stderr)
            return False
        return True

    def _event(self, kind: str, **details: Any) -> None:
        self.run.event(kind, stage=self.stage, job_id=self.job_id, attempt=self.number, **details)


def _holder_text(holder: dict[str, Any]) -> str:
    return f"job {holder.get('job_id')}, attempt {holder.get('attempt')} on {holder.get('host')}"


def local_end(run: Run, stage: str, job_id: str, number: int, exit_status: int) -> int:
    """Say how an attempt without Slurm ended: the local scheduler, or a person, decides what goes on."""
    await_owner(run, job_id, number, stage)
    record = read_verdict(run, job_id, number, stage, exit_status)
    if read_record(run.verdict(job_id, number)).get("stage") != stage:  # otherwise the stage has said it
        say(f"{record['verdict']}: {record['reason']}")
        write_verdict(run, job_id, number, stage, record["verdict"], record["reason"], record["step"])
    run.warned(job_id, number).unlink(missing_ok=True)
    return EXIT_CODES[record["verdict"]]


def main(argv: list[str]) -> int:
    """Serve sbatch/lib.sh."""
    usage = (
        "usage: python -m pipeline.jobscript begin RUN STAGE JOB ATTEMPT | end RUN STAGE JOB ATTEMPT STATUS slurm|local"
    )
    if len(argv) not in (5, 7) or not argv[4].isdigit():
        print(usage, file=sys.stderr)
        return EXIT_USAGE
    verb, run, stage, job_id, number = argv[0], Run(Path(argv[1])), argv[2], argv[3], int(argv[4])
    try:
        if verb == "begin":
            return Host(run, stage, job_id, number).begin()
        if argv[6] == "local":
            return local_end(run, stage, job_id, number, int(argv[5]))
        return Host(run, stage, job_id, number).end(int(argv[5]))
    except UserError as error:
        say(f"{stage}: {error}")
        return error.exit_code
    except OSError as error:  # not even a verdict can be written
        say(f"{stage}: storage: {error}")
        return EXIT_STORAGE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
