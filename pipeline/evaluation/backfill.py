"""Evaluate Jobs for the holes of the schedule: as many as there is work for, each once, whoever asks.

`python -m pipeline.evaluation.backfill RUN` is called on the host of a pretrain Job at each new checkpoint
(sbatch/watch.sh), and by evaluate Jobs that leave Units behind. Each Job has a numbered record in evaluations/, made by
O_EXCL before sbatch is called: of two that ask at once, one submits.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pipeline.cluster.schema import Cluster
from pipeline.config.load import load_run_config
from pipeline.config.schema import Config
from pipeline.errors import EXIT_DONE, EXIT_USAGE, UserError
from pipeline.evaluation.scoring import Left, what_is_left
from pipeline.files import write_json
from pipeline.plan.flags import gpus_of, sbatch_flags
from pipeline.run.complete import steps_to_evaluate
from pipeline.run.folder import Run
from pipeline.run.records import number, read_record, read_records
from pipeline.slurm.bad_nodes import bad_nodes_of
from pipeline.slurm.commands import Slurm
from pipeline.slurm.exclusion import choose_exclusion, option, split_off
from pipeline.slurm.states import LIVE
from pipeline.slurm.time_limits import time_seconds
from pipeline.slurm.window import (
    Hole,
    Need,
    Size,
    choose_sizes,
    find_holes,
    nodes_from,
    planned_from,
    reservations_from,
)
from pipeline.submit.run_folder import read_cluster

STAGE = "evaluate"
STARTUP_SECONDS = 60.0  # where none was measured: a container, torch, the weights
LOAD_SHARE = 1.5  # of the time until the stage's first line, that start-up with loading is taken for
VOID_SECONDS = 600.0  # after which a record without a Job is one of a caller that was killed before sbatch


class Backfill:
    """The evaluate Jobs of a Run beside those of its chain."""

    def __init__(self, run: Run, config: Config, cluster: Cluster, slurm: Slurm) -> None:
        self.run, self.config, self.cluster, self.slurm = run, config, cluster, slurm
        self.told: Callable[[str], None] = lambda text: print(text, flush=True)

    def left(self) -> Left:
        return what_is_left(self.run, self.config, steps_to_evaluate(self.run, self.config))

    def holes(self) -> list[Hole]:
        """Return the holes of the schedule, as far as this user may see them."""
        nodes, planned, reservations = self.slurm.schedule()
        ours = [str(record.get("job_id")) for _, record in self.records()]
        claims = planned_from(planned, ours) + reservations_from(reservations)
        options = self.cluster.sbatch_options(STAGE, self.config.evaluate)
        return find_holes(time.time(), nodes_from(nodes), claims, options.get("partition"))

    def need(self, seconds: float, jobs: int) -> Need:
        """Return what `seconds` of Units ask of the schedule."""
        cpus = int(self.cluster.cpus_per_task or 1)
        gpus = gpus_of(STAGE, self.config, self.cluster)
        return Need(seconds, startup_seconds(self.run), gpus, cpus, time_seconds(self.config.evaluate.time), jobs)

    def sizes(self, seconds: float, jobs: int) -> list[Size]:
        return choose_sizes(self.holes(), self.need(seconds, jobs))

    def submit(self, seconds: float, why: str, ending: str = "") -> list[str]:
        """Submit what `seconds` of open Units need beside the Jobs that are queued for them; return the new ids.

        `ending` is the Job that asks, on its last legs.
        """
        live = [record for record in self.live() if not ending or record.get("job_id") != ending]
        room = self.config.evaluate.most_jobs - len(live)
        startup = startup_seconds(self.run)
        served = sum(max(0.0, (number(record.get("minutes")) or 0) * 60 - startup) for record in live)
        if room <= 0 or seconds <= served:
            return []
        ids = []
        for size in self.sizes(seconds - served, room):
            if (job_id := self._submit(size.flags(), why, minutes=size.minutes, hole=size.why)) is None:
                break
            ids.append(job_id)
        return ids

    def queue_beforehand(self, jobs: Sequence[tuple[str, int]]) -> list[str]:
        """Queue Jobs at `after:JOB+MINUTES`, for nodes that may not call sbatch; nothing where some are queued."""
        if self.live():
            return []
        longest = time_seconds(self.config.evaluate.time) // 60
        shortest = math.ceil(max(60.0, 5 * startup_seconds(self.run)) / 60)
        size = Size(longest, min(longest, max(shortest, math.ceil(longest / 2))), "queued beforehand")
        ids = []
        for job, minutes in jobs[: self.config.evaluate.most_jobs]:
            flags = [*size.flags(), f"--dependency=after:{job}+{minutes}", "--kill-on-invalid-dep=yes"]
            job_id = self._submit(flags, f"{minutes} minutes after job {job}", minutes=size.minutes, hole=size.why)
            ids += [job_id] if job_id else []
        return ids

    def live(self) -> list[dict[str, Any]]:
        """Return the records of the Jobs that are queued or running; those that have ended are marked as such."""
        open_records = [(path, record) for path, record in self.records() if not record.get("ended")]
        tokens = {record["token"]: path for path, record in open_records if not record.get("job_id")}
        found = self.slurm.find(list(tokens)) if tokens else {}
        jobs = self.slurm.jobs([str(record["job_id"]) for _, record in open_records if record.get("job_id")])
        live = []
        for path, record in open_records:
            if not record.get("job_id") and record["token"] in found:  # its caller was killed before it heard the id
                record["job_id"] = found[record["token"]]
                write_json(path, record, durable=False)
                jobs |= self.slurm.jobs([record["job_id"]])
            job = jobs.get(str(record.get("job_id")))
            young = time.time() - (number(record.get("submitted")) or 0) < VOID_SECONDS
            if (job is None and young) or (job is not None and (job.state in LIVE or not job.answered)):
                live.append(record)
            else:
                write_json(path, record | {"ended": True}, durable=False)
        return live

    def records(self) -> list[tuple[Path, dict[str, Any]]]:
        return [
            (path, record) for path in sorted(self.run.evaluations.glob("[0-9]*.json")) if (record := read_record(path))
        ]

    def cancel_pending(self) -> None:
        """Cancel the Jobs that wait: nothing is left for them."""
        ids = [str(record["job_id"]) for record in self.live() if record.get("job_id")]
        jobs = self.slurm.jobs(ids)
        self.slurm.cancel([job_id for job_id in ids if jobs[job_id].state == "pending"])

    def _submit(self, flags: Sequence[str], why: str, **about: Any) -> str | None:
        """Submit one Job under the next number; None where another caller has just taken that number."""
        self.run.evaluations.mkdir(exist_ok=True)
        last = max((int(path.stem) for path, _ in self.records()), default=0)
        path = self.run.evaluations / f"{last + 1:06d}.json"
        token = f"pipeline:{read_record(self.run.record).get('id', self.run.name)}:{STAGE}.{path.stem}"
        record = {"stage": STAGE, "number": last + 1, "token": token, "why": why, "submitted": time.time()} | about
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        except FileExistsError:
            return None
        write_json(path, record)
        script = str(self.run.snapshot / "sbatch" / f"{STAGE}.sbatch")
        try:
            job_id = self.slurm.submit(self._flags(flags), script, [str(self.run.root)], token=token)
        except UserError:
            path.unlink(missing_ok=True)
            raise
        write_json(path, record | {"job_id": job_id})
        self.run.event("submit", stage=STAGE, job_id=job_id, reason=why, hole=about.get("hole"))
        self.told(f"{STAGE}: job {job_id} is submitted, {' '.join(flags)}: {about.get('hole')}")
        return job_id

    def _flags(self, own: Sequence[str]) -> list[str]:
        """Return sbatch's options: those of the Stage, with these limits, and behind others in the queue."""
        given = [word.split("=")[0] for word in own]
        flags = [
            word
            for word in sbatch_flags(STAGE, 0, self.config, self.cluster, self.run)
            if word.split("=")[0] not in given and not word.startswith("--signal=")
        ]
        if not any(word.startswith("--nice") for word in flags):
            flags.append(f"--nice={self.config.evaluate.nice}")
        script = str(self.run.snapshot / "sbatch" / f"{STAGE}.sbatch")
        bad = bad_nodes_of(self.run, self.cluster).read().values()
        names = choose_exclusion(self.slurm, [*flags, *own], script, bad).names
        others, excluded = split_off(flags)
        return [*others, *own, *option([*excluded, *names])]


def startup_seconds(run: Run) -> float:
    """Return how long an evaluate Job takes from its beginning until it scores, as measured in this Run."""
    took = [
        started - began
        for event in read_records(run.events)
        if event.get("event") == "start" and event.get("stage") == STAGE
        if (started := number(event.get("time"))) is not None and (began := number(event.get("began"))) is not None
    ]
    return LOAD_SHARE * sorted(took)[len(took) // 2] if took else STARTUP_SECONDS


def main(argv: list[str]) -> int:
    """Submit what a new checkpoint needs; called in a batch shell."""
    if len(argv) != 1:
        print("usage: python -m pipeline.evaluation.backfill RUN", file=sys.stderr)
        return EXIT_USAGE
    run = Run(Path(argv[0]))
    try:
        config, cluster = load_run_config(run.config), read_cluster(run)
        if config.evaluate.beside_training and not run.stop.exists():
            backfill = Backfill(run, config, cluster, Slurm())
            if left := backfill.left():
                backfill.submit(left.seconds, f"a checkpoint of step {steps_to_evaluate(run, config)[-1]}")
    except UserError as error:
        print(f"{STAGE}: {error}", file=sys.stderr)
        return error.exit_code
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
