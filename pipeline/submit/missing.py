"""Which Jobs of a chain are neither done nor at Slurm: what `submit` adds, and what `status` says is not submitted."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import takewhile
from typing import Any

from pipeline.cluster.schema import Cluster
from pipeline.config.schema import Config
from pipeline.plan.flags import TOKENIZE_PHASES
from pipeline.plan.jobs import STAGES, phases
from pipeline.run.attempts import all_attempts
from pipeline.run.complete import is_complete
from pipeline.run.folder import Run
from pipeline.run.job_ledger import read_ledger
from pipeline.run.records import JobRecord, read_record, whole
from pipeline.submit.queue import QueuedJob


@dataclass(frozen=True)
class Place:
    """What a Job of the Plan does, as far as it is compared with those at Slurm."""

    name: str
    stage: str
    segment: int = 0
    phase: str = ""

    def is_of(self, queued: QueuedJob, role: str = "chain") -> bool:
        """Tell whether a Job at Slurm does this."""
        record = queued.record
        if (record.stage, record.phase) != (self.stage, self.phase) or record.role not in ("chain", role):
            return False
        return not self.segment or record.segment in (0, self.segment)


def missing_places(
    places: Iterable[Place],
    alive: Sequence[QueuedJob],
    is_complete: Callable[[str], bool],
    begun: Collection[int] = (),
    role: str = "chain",
) -> list[Place]:
    """Return what has work to do and no Job that is alive. `begun`: Segments of the living chain that had their turn.

    Of an unknown answer a Job is taken to live, so nothing is missing that may be there.
    """
    return [
        place
        for place in places
        if not is_complete(place.stage)
        and not any(place.is_of(queued, role) for queued in alive)
        and not _is_past(place, alive)
        and not (place.segment and place.segment in begun)
    ]


def _is_past(place: Place, alive: Sequence[QueuedJob]) -> bool:
    """Tell whether a later phase of the Stage is queued already, so that this one has ended well."""
    later = TOKENIZE_PHASES[TOKENIZE_PHASES.index(place.phase) + 1 :] if place.phase else ()
    return any(q.is_chain(place.stage) and q.record.phase in later and not q.job.stuck for q in alive)


def begun_segments(run: Run, alive: Sequence[QueuedJob]) -> set[int]:
    """Return the numbers of the Segments that have worked since the chain was started that is alive; none if it is not.

    Where Segments are queued beforehand, one that ended is not missed, but one that was cancelled before it began is.
    """
    since = chain_since(alive)
    if since is None:
        return set()
    worked = {attempt.job_id for attempt in all_attempts(run, "pretrain")}
    ours = [r for r in read_ledger(run) if (r.stage, r.role) == ("pretrain", "chain") and r.since >= since]
    return {record.segment for record in ours if record.job_id in worked}


def chain_since(alive: Sequence[QueuedJob]) -> float | None:
    """Return when the chain was started that is alive (unix s), None where no Segment is."""
    return min((queued.record.since for queued in alive if queued.is_chain("pretrain")), default=None)


def silent_segments(run: Run) -> list[str]:
    """Return the ids of the last Segments of which nothing is heard: they never opened a log, or left no verdict."""
    attempts = {one.job_id: one for one in all_attempts(run, "pretrain")}  # the last of each Job

    def is_silent(record: JobRecord) -> bool:
        last = attempts.get(str(record.job_id))
        return last.verdict is None if last else not any(run.logs.glob(f"pretrain-{record.job_id}.*.log"))

    segments = [r for r in read_ledger(run) if (r.stage, r.role) == ("pretrain", "chain") and r.job_id]
    return [str(record.job_id) for record in takewhile(is_silent, reversed(segments))][::-1]


def lacks_successor(alive: Sequence[QueuedJob]) -> QueuedJob | None:
    """Return the Segment that works while none waits behind it."""
    segments = [queued for queued in alive if queued.is_chain("pretrain")]
    if not segments or any(queued.waits or not queued.job.answered for queued in segments):
        return None
    return segments[-1]


def planned_places(run: Run, config: Config, cluster: Cluster) -> list[Place]:
    """Return what the chain consists of: as plan.json has it, unless that is of a Stage that was asked for alone."""
    jobs = read_record(run.plan).get("jobs")
    places = [place for job in jobs if (place := _place(job))] if isinstance(jobs, list) else []
    if any(place.stage in ("tokenize", "pretrain") for place in places):
        return places
    return [Place(phase or stage, stage, 0, phase) for stage in STAGES for phase in phases(stage, config, cluster)]


def _place(job: Any) -> Place | None:
    if not isinstance(job, Mapping) or not isinstance(job.get("name"), str) or not isinstance(job.get("stage"), str):
        return None
    return Place(job["name"], job["stage"], whole(job.get("segment")) or 0, str(job.get("phase") or ""))


def not_submitted(run: Run, config: Config, cluster: Cluster, alive: Sequence[QueuedJob]) -> list[str]:
    """Name the Jobs of a living chain that are not at Slurm, for a person; none where nothing of it is alive."""
    if not any(queued.record.role == "chain" for queued in alive) or run.stop.exists():
        return []
    is_complete = cache(partial(_is_complete, run, config))
    places = planned_places(run, config, cluster)
    begun = begun_segments(run, alive) if any(place.segment for place in places) else ()
    names = [place.name for place in missing_places(places, alive, is_complete, begun)]
    if cluster.nodes_may_submit and not is_complete("pretrain") and (working := lacks_successor(alive)):
        names.insert(0, f"pretrain after job {working.job_id}")
    return names


def _is_complete(run: Run, config: Config, stage: str) -> bool:
    try:
        return is_complete(run, config, stage)
    except (OSError, ValueError):
        return True  # it cannot be said that anything is missing
