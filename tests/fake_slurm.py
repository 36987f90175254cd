#!/usr/bin/env python3
"""A small Slurm for tests: linked as sbatch, squeue, scontrol, scancel, srun in a folder on PATH.

It keeps its Jobs in $FAKE_SLURM/jobs.json and knows Slurm's rule that a dependency which failed once stays failed.
Nothing runs; a test sets states by `set_state`. $FAKE_SLURM/die_after holds a number: sbatch kills its caller after
that many submissions, as a login node that goes down would.
"""

from __future__ import annotations

import fcntl
import json
import os
import pwd
import signal
import stat
import sys
from pathlib import Path

TOO_FEW = "Batch job submission failed: Requested node configuration is not available"
USER = pwd.getpwuid(os.getuid()).pw_name
COLUMNS = "whole id state exit_code restarts left limit start nodes dependency user reason name comment".split()
COMMANDS = ("sbatch", "squeue", "scontrol", "scancel", "sinfo", "srun", "sacct", "sacctmgr", "sprio", "sshare")


def install(folder: Path) -> dict[str, str]:
    """Put the commands into `folder`/bin and return the environment that finds them."""
    bin_ = folder / "bin"
    bin_.mkdir(parents=True)
    for name in COMMANDS:
        script = bin_ / name
        script.write_text(
            f'#!/bin/sh\nFAKE_SLURM=${{FAKE_SLURM:-{folder}}} exec {sys.executable} -S {__file__} {name} "$@"\n'
        )
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return {"FAKE_SLURM": str(folder), "PATH": f"{bin_}:{os.environ['PATH']}"}


def read(folder: Path) -> dict[str, dict]:
    path = folder / "jobs.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def write(folder: Path, jobs: dict[str, dict]) -> None:
    (folder / "jobs.json").write_text(json.dumps(jobs))


def set_state(folder: Path, job_id: str, state: str, **changes: object) -> None:
    """End a Job, or let it run; its dependants become what Slurm would make of them."""
    jobs = read(folder)
    jobs[job_id] |= {"state": state} | changes
    settle(jobs)
    write(folder, jobs)


def settle(jobs: dict[str, dict]) -> None:
    """Cancel what can no longer start. It is decided once, when the parent ends."""
    for job in jobs.values():
        for edge in filter(None, job["dependency"].split(",")):
            kind, _, parent = edge.partition(":")
            failed = jobs.get(parent, {}).get("state") in ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
            if kind == "afterok" and failed and job["state"] == "PENDING":
                job["state"], job["reason"] = (
                    ("CANCELLED", "") if job["kill"] else ("PENDING", "DependencyNeverSatisfied")
                )


def option(words: list[str], name: str, default: str = "") -> str:
    return next((w.split("=", 1)[1] for w in words if w.startswith(f"--{name}=")), default)


def sbatch(words: list[str], folder: Path, jobs: dict[str, dict]) -> int:
    with (folder / "sbatch.log").open("a") as log:
        log.write(json.dumps(words) + "\n")
    with (folder / "environment.log").open("a") as log:  # which becomes the Job's
        log.write(json.dumps(dict(os.environ)) + "\n")
    if (refusal := folder / "refuse").is_file():
        print(refusal.read_text(), file=sys.stderr)
        return 1
    if (take := folder / "take").is_file() and len(jobs) >= int(take.read_text()):  # no more than so many
        print((folder / "refuse_later").read_text(), file=sys.stderr)
        return 1
    if (nodes := folder / "nodes").is_file():  # all that this Slurm has
        left = set(nodes.read_text().split()) - set(option(words, "exclude").split(","))
        if len(left) < int(option(words, "nodes", "1")):
            print(
                f"allocation failure: {TOO_FEW}" if "--test-only" in words else f"sbatch: error: {TOO_FEW}",
                file=sys.stderr,
            )
            return 1
    if "--test-only" in words:
        print("sbatch: Job 99 to start at 2030-01-01T00:00:00 using 1 processors on nodes n1", file=sys.stderr)
        return 0
    job_id = str(100 + len(jobs) + 1)
    jobs[job_id] = {
        "state": "PENDING", "reason": "Priority", "comment": option(words, "comment"), "kill": "--kill-on-invalid-dep=yes" in words,
        "dependency": option(words, "dependency"), "name": option(words, "job-name"), "words": words,
        "excluded": option(words, "exclude"),
    }  # fmt: skip
    settle(jobs)
    write(folder, jobs)
    bomb = folder / "die_after"
    if bomb.is_file() and len(jobs) >= int(bomb.read_text()):
        os.kill(os.getppid(), signal.SIGKILL)  # before its answer is read
    print(job_id)
    return 0


def squeue(words: list[str], folder: Path, jobs: dict[str, dict]) -> int:
    if words[-1] == "%F|%x":
        for job_id in words[words.index("-j") + 1].split(","):
            print(f"{job_id}|{jobs[job_id].get('excluded', '')}")
        return 0
    asked = words[words.index("-j") + 1].split(",") if "-j" in words else list(jobs)
    print(squeue_list([job | {"id": i} for i in asked if (job := jobs.get(i)) and not job.get("forgotten")]), end="")
    return 0


def squeue_list(jobs: list[dict]) -> str:
    """Write what squeue says of Jobs, each a dict of COLUMNS (by `id`, state, ...) and of what else a test keeps."""
    rows = [
        " ARRAY_JOB_ID JOBID STATE EXIT_CODE RESTARTS LEFT LIMIT START NODELIST DEPENDENCY USER REASON NAME COMMENT".split()
    ]
    for job in jobs:
        told = {
            "whole": job["id"].partition("_")[0], "exit_code": "0", "restarts": "0", "left": "10:00",
            "limit": "1:00:00", "start": "N/A", "nodes": "", "dependency": "", "user": USER, "reason": "None", "name": "",
            "comment": "",
        } | job  # fmt: skip
        rows.append([str(told[name]) for name in COLUMNS])
    return "".join("\x1f".join(cells) + "\x17\n" for cells in rows)


def sacct_list(*jobs: tuple[str, ...]) -> str:
    """Write what sacct says of Jobs, each given by id, state, exit code, limit and nodes."""
    return "".join("\x1f".join([*job, USER, "", ""]) + "\n" for job in jobs)


def scontrol(words: list[str], folder: Path, jobs: dict[str, dict]) -> int:
    if words[0] == "ping":
        print("Slurmctld(primary) at fake is UP")
    elif words == ["show", "config"]:
        print(f"MaxArraySize            = {(folder / 'max_array_size').read_text()}")
    elif words[:2] == ["show", "hostnames"]:
        print("\n".join(words[2].split(",")))
    elif words[0] == "update":
        fields = dict(word.split("=", 1) for word in words[1:])
        jobs[fields["JobId"]] |= {"dependency": fields.get("Dependency", jobs[fields["JobId"]]["dependency"])}
        if "Requeue" in fields:
            jobs[fields["JobId"]]["requeue"] = fields["Requeue"]
        if "StartTime" in fields:
            jobs[fields["JobId"]]["begins"] = fields["StartTime"]
        if "ExcNodeList" in fields:
            jobs[fields["JobId"]] |= {"excluded": fields["ExcNodeList"], "reason": "Priority"}
        write(folder, jobs)
    elif words[0] == "requeue":
        if (folder / "no_requeue").is_file():
            print("scontrol: error: Requested operation is presently disabled", file=sys.stderr)
            return 1
        jobs[words[1]] |= {"state": "PENDING", "reason": "BeginTime"}
        write(folder, jobs)
    elif "show" in words and "job" in words:
        print("slurm_load_jobs error: Invalid job id specified", file=sys.stderr)
        return 1
    return 0


def scancel(words: list[str], folder: Path, jobs: dict[str, dict]) -> int:
    with (folder / "scancel.log").open("a") as log:
        log.write(json.dumps(words) + "\n")
    for job_id in words:
        jobs[job_id]["state"] = "CANCELLED"
    settle(jobs)
    write(folder, jobs)
    return 0


def nothing(words: list[str], folder: Path, jobs: dict[str, dict]) -> int:
    print("Slurm accounting storage is disabled", file=sys.stderr)
    return 1


def srun(words: list[str], folder: Path, jobs: dict[str, dict]) -> int:
    print("      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH")
    return 0


def main() -> int:
    name, words, folder = sys.argv[1], sys.argv[2:], Path(os.environ["FAKE_SLURM"])
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with (folder / "calls").open("a") as calls:
            calls.write(f"{name} {' '.join(words)}\n")
        if (answer := folder / f"{name}.answer").is_file():  # what a test wants it to say
            print(answer.read_text(), end="")
            return 0
        return globals().get(name, nothing)(words, folder, read(folder))


if __name__ == "__main__":
    sys.exit(main())
