"""Evaluate Jobs for the holes of the schedule: as many as there is work for, each once, whoever asks.

`python -m pipeline.evaluation.backfill RUN` is called on the host of a pretrain Job at each new checkpoint
(sbatch/watch.sh), and by evaluate Jobs that leave Units behind. Of two that ask at once, one submits.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pipeline.cluster.schema import Cluster
from pipeline.config.load import load_run_config
from pipeline.config.schema import Config
from pipeline.errors import EXIT_DONE, EXIT_USAGE, NotReadyError, UserError
from pipeline.evaluation.scoring import Left, what_is_left
from pipeline.plan.flags import gpus_of
from pipeline.run.complete import steps_to_evaluate
from pipeline.run.folder import Run
from pipeline.run.job_ledger import read_ledger
from pipeline.run.owner import owned
from pipeline.run.records import number, read_records
from pipeline.slurm.commands import Slurm
from pipeline.slurm.options import option_words
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
from pipeline.submit.queue import JobQueue, QueuedJob
from pipeline.submit.run_folder import read_cluster

STAGE = "evaluate"
STARTUP_SECONDS = 60.0  # where none was measured: a container, torch, the weights
LOAD_SHARE = 1.5  # of the time until the stage's first line, that start-up with loading is taken for


class Backfill:
    """The evaluate Jobs of a Run beside those of its chain."""

    def __init__(self, run: Run, config: Config, cluster: Cluster, slurm: Slurm, by: str = "") -> None:
        self.run, self.config, self.cluster, self.slurm = run, config, cluster, slurm
        self.queue = JobQueue(run, config, cluster, slurm)
        self.by = by  # the attempt that asks
        self.told: Callable[[str], None] = lambda text: print(text, flush=True)

    def left(self) -> Left:
        return what_is_left(self.run, self.config, steps_to_evaluate(self.run, self.config))

    def holes(self) -> list[Hole]:
        """Return the holes of the schedule, as far as this user may see them."""
        nodes, planned, reservations = self.slurm.schedule()
        ours = [record.job_id for record in read_ledger(self.run) if record.job_id]
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

        `ending` is the Job that asks, on its last legs. Of two that ask at once, the second finds the first's Jobs.
        """
        try:
            with owned(self.run.control / "backfill.json", "the backfill of this Run"):
                return self._submit_within(seconds, why, ending)
        except NotReadyError:
            return []

    def _submit_within(self, seconds: float, why: str, ending: str) -> list[str]:
        live = [queued for queued in self.live() if not ending or queued.job_id != ending]
        room = self.config.evaluate.most_jobs - len(live)
        startup = startup_seconds(self.run)
        served = sum(max(0.0, (queued.record.minutes or 0) * 60 - startup) for queued in live)
        if room <= 0 or seconds <= served:
            return []
        return [self._submit(size, why) for size in self.sizes(seconds - served, room)]

    def queue_beforehand(self, jobs: Sequence[tuple[str, int]]) -> list[str]:
        """Queue Jobs at `after:JOB+MINUTES`, for nodes that may not call sbatch; nothing where some are queued."""
        if self.live():
            return []
        longest = time_seconds(self.config.evaluate.time) // 60
        shortest = math.ceil(max(60.0, 5 * startup_seconds(self.run)) / 60)
        size = Size(longest, min(longest, max(shortest, math.ceil(longest / 2))), "queued beforehand")
        return [
            self._submit(size, f"{minutes} minutes after job {job}", f"after:{job}+{minutes}")
            for job, minutes in jobs[: self.config.evaluate.most_jobs]
        ]

    def live(self) -> list[QueuedJob]:
        """Return the Jobs beside those of the chain that are queued or running, or of which nothing is known."""
        return [q for q in self.queue.alive() if q.record.stage == STAGE and q.record.role == "beside"]

    def cancel_pending(self) -> None:
        """Cancel the Jobs that wait: nothing is left for them."""
        self.queue.cancel(queued for queued in self.live() if queued.waits)

    def _submit(self, size: Size, why: str, dependency: str = "") -> str:
        """Submit one Job of this size, behind others in the queue."""
        plan = self.queue.flags(STAGE)
        flags = size.flags() | ({} if "nice" in plan else {"nice": str(self.config.evaluate.nice)})
        record = self.queue.submit(
            STAGE, dependency, flags=flags, without=("signal",), role="beside", why=why, minutes=size.minutes,
            by=self.by,
        )  # fmt: skip
        self.run.event("submit", stage=STAGE, job_id=record.job_id, reason=why, window=size.why)
        limits = " ".join(option_words(flags))
        self.told(f"{STAGE}: job {record.job_id} is submitted, {limits}: {size.why}")
        return str(record.job_id)


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
            backfill = Backfill(run, config, cluster, cluster.slurm_on_nodes())
            if left := backfill.left():
                backfill.submit(left.seconds, f"a checkpoint of step {steps_to_evaluate(run, config)[-1]}")
    except UserError as error:
        print(f"{STAGE}: {error}", file=sys.stderr)
        return error.exit_code
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
