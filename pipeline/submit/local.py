"""The local scheduler: runs a Plan's Jobs on this machine, one after another."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.text import Text

from pipeline.config.schema import Config
from pipeline.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, NotReadyError
from pipeline.files import write_json
from pipeline.hints import command
from pipeline.plan.jobs import Job, Plan
from pipeline.plan.launch import FOREIGN_VARIABLES
from pipeline.preflight.findings import read_table
from pipeline.run.complete import is_complete
from pipeline.run.folder import Run
from pipeline.run.owner import is_alive, process_start, this_process
from pipeline.run.verdict import COMPLETE, STOPPED, how_it_ended, verdict_of
from pipeline.slurm.time_limits import time_seconds
from pipeline.status.progress import JobProgress, is_lively
from pipeline.submit.run_folder import read_jobs

POLL_SECONDS = 0.2
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FORMER_ATTEMPT_SECONDS = 60
FOREIGN_PREFIXES = ("SLURM_", "SBATCH_", "SRUN_", "SALLOC_", "PMI", "TORCHELASTIC_", "PIPELINE_")


class Jobs:
    """jobs.json while the local scheduler works on it: what was started, and how it went."""

    def __init__(self, run: Run, plan: Plan) -> None:
        self.run = run
        former = {job["job_id"]: job for job in read_jobs(run)["jobs"]}
        self.records: dict[str, dict[str, Any]] = dict(former)  # one stage alone must not forget the others
        for job in plan.jobs:
            fresh = {"stage": job.stage, "segment": job.segment, "job_id": job.job_id, "attempt": None}
            fresh |= {"state": "pending", "reason": "", "log": None, "started": None, "ended": None}
            self.records[job.job_id] = fresh | former.get(job.job_id, {})

    def update(self, job: Job, **changes: Any) -> None:
        """Change one Job's record on disk."""
        self.records[job.job_id] |= changes
        self.write()

    def write(self) -> None:
        write_json(self.run.jobs, {"scheduler": "local", **this_process(), "jobs": list(self.records.values())})

    def next_attempt(self, job: Job) -> int:
        last = self.records[job.job_id]["attempt"]
        return 0 if last is None else last + 1

    def former_processes(self) -> Iterator[dict[str, Any]]:
        for record in self.records.values():
            if record["state"] == "running" and is_alive(record.get("process")):
                yield record


def run_chain(run: Run, config: Config, plan: Plan, console: Console) -> int:
    """Run what is missing of the Plan in order of its dependencies, stop at the first failure; return the exit code.

    The caller owns control/scheduler.json.
    """
    with Interrupts() as interrupts:
        jobs = Jobs(run, plan)
        _await_former_attempt(jobs, console)
        try:
            for job in plan.jobs:
                if is_complete(run, config, job.stage):
                    if jobs.records[job.job_id]["state"] != "completed":
                        jobs.update(job, state="completed", reason="", ended=time.time())
                    console.print(_titled(job, "complete already"))
                elif (code := _run_job(run, config, job, jobs, console, interrupts)) != EXIT_DONE:
                    return code
        finally:
            jobs.write()
    return EXIT_DONE


def _await_former_attempt(jobs: Jobs, console: Console) -> None:
    """Wait for the processes of a killed scheduler: they were told to save and end when it died."""
    deadline = time.monotonic() + FORMER_ATTEMPT_SECONDS
    for record in jobs.former_processes():
        console.print(
            f"waiting for an earlier attempt of {record['stage']} to end (process {record['process']['pid']})"
        )
        while is_alive(record["process"]):
            if time.monotonic() > deadline:
                raise NotReadyError(
                    f"an earlier attempt of {record['stage']} still runs as process {record['process']['pid']}; "
                    f"end it with: kill {record['process']['pid']}"
                )
            time.sleep(POLL_SECONDS)


def _run_job(run: Run, config: Config, job: Job, jobs: Jobs, console: Console, interrupts: Interrupts) -> int:
    """Run one Job to its end and record it."""
    if run.stop.exists():
        jobs.update(job, state="stopped", reason="control/stop is there")
        console.print(_titled(job, f"not started: the Run was stopped. Go on with:\n  {command('resume', run.root)}"))
        return EXIT_FAILED
    if interrupts.count:  # while the one before was ending
        console.print(_titled(job, f"not started: interrupted. Go on with:\n  {command('resume', run.root)}"))
        return EXIT_INTERRUPTED
    attempt = jobs.next_attempt(job)
    log = run.log(job.stage, job.job_id, attempt)
    started = time.time()
    process = _start(run, job, attempt, log)
    record = {"pid": process.pid, "started": process_start(process.pid), "host": this_process()["host"]}
    jobs.update(
        job, state="running", reason="", attempt=attempt, process=record, started=started, ended=None,
        log=str(log.relative_to(run.root)),
    )  # fmt: skip
    timed_out = _watch(run, config, job, process, jobs, console, interrupts)
    verdict = verdict_of(run, job.job_id, attempt) or how_it_ended(
        run, job.job_id, attempt, job.stage, process.returncode
    )
    states: dict[str, str] = {COMPLETE: "completed", STOPPED: "stopped"}
    state = states.get(verdict.verdict, "failed")
    reason = f"the time limit of {job.time} was reached" if timed_out else verdict.reason
    jobs.update(job, state=state, reason="" if state == "completed" else reason, ended=time.time(), process=None)
    if job.stage == "preflight" and is_lively(console):  # elsewhere its log has been shown
        console.print(read_table(run, job.job_id, attempt), soft_wrap=True)
    if state == "completed":
        console.print(_titled(job, f"done in {time.time() - started:.0f} s"))
        return EXIT_DONE
    _explain(run, job, state, reason, log, console)
    return EXIT_INTERRUPTED if interrupts.count else EXIT_FAILED


def _watch(
    run: Run,
    config: Config,
    job: Job,
    process: subprocess.Popen[bytes],
    jobs: Jobs,
    console: Console,
    interrupts: Interrupts,
) -> bool:
    """Show progress until the Job ends, pass interrupts on; return whether its time ran out."""
    deadline = time.monotonic() + time_seconds(job.time)
    timed_out, passed_on = False, 0
    with JobProgress(run, config, jobs.records[job.job_id], console) as progress:
        while process.poll() is None:
            if time.monotonic() > deadline and not timed_out:
                timed_out = True
                process.terminate()
            if interrupts.count > 1 and passed_on:  # asked twice: no more waiting
                os.killpg(process.pid, signal.SIGKILL)
            elif interrupts.count and not passed_on:
                console.print("stopping cleanly; once more to kill at once")
                process.terminate()
                passed_on = interrupts.count = 1
            progress.update()
            time.sleep(POLL_SECONDS)
        progress.update()
    return timed_out


def _start(run: Run, job: Job, attempt: int, log: Path) -> subprocess.Popen[bytes]:
    """Start a job script in a session of its own: Ctrl-C reaches us alone, and we pass it on in order."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in FOREIGN_VARIABLES and not name.startswith(FOREIGN_PREFIXES)
    }
    environment |= {"PIPELINE_JOB_ID": job.job_id, "PIPELINE_ATTEMPT": str(attempt)}
    libc = ctypes.CDLL(None)

    def die_with_scheduler() -> None:
        libc.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG

    with log.open("ab") as output:
        return subprocess.Popen(
            job.command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            cwd=run.root, env=environment, start_new_session=True, preexec_fn=die_with_scheduler,
        )  # fmt: skip


def _explain(run: Run, job: Job, state: str, reason: str, log: Path, console: Console) -> None:
    """Say how a Job ended, where to read on, and how to go on."""
    console.print(_titled(job, f"{state}: {reason}"))
    if state == "failed":
        console.print(f"  log:    {log}", soft_wrap=True)
    console.print(f"  go on:  {command('resume', run.root)}", soft_wrap=True)


def _titled(job: Job, text: str) -> Text:
    return Text.assemble((job.stage, "bold"), "  ", text)


class Interrupts:
    """Count Ctrl-C, SIGTERM and SIGHUP while Jobs run.

    Counted and not raised: an exception that a handler raises inside a destructor or an import is lost with the signal.
    """

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Interrupts:
        self.former = {number: signal.signal(number, self._take) for number in STOPPING}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.former.items():
            signal.signal(number, handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
