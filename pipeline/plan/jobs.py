"""What will be run, as pure data: Jobs, their edges, their command lines, their launch files."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pipeline.cluster.schema import Cluster
from pipeline.config.schema import Config
from pipeline.errors import UserError
from pipeline.plan import sizes
from pipeline.plan.estimate import estimate
from pipeline.plan.ettr import Reliability
from pipeline.plan.flags import ARRAY_PHASE, PARALLEL, TOKENIZE_PHASES, Flags, gpus_of, job_flags, signal_lead
from pipeline.plan.launch import launch_file
from pipeline.plan.survival import Survival, survival_text
from pipeline.run.folder import Run
from pipeline.slurm.options import option_words
from pipeline.slurm.time_limits import time_seconds

STAGES = ("tokenize", "pretrain", "evaluate", "inference")
ALONE = ("preflight",)  # has a launch file, but is a Job only where it is asked for
START_SECONDS = 120  # of a Segment that start-up is taken to cost when Segments are counted
MOST_SEGMENTS = 1000
REQUEUE_SECONDS = 120  # that Slurm holds a requeued Job back
DAY = 86_400


@dataclass(frozen=True)
class Job:
    """One submission of a Stage."""

    name: str  # unique in a Plan: the Stage, with the Segment's number where there are several, or the phase
    job_id: str  # the local scheduler's; Slurm gives its own
    stage: str
    segment: int  # 1, 2, … where Segments are queued beforehand, else 0
    after: list[str]  # edges in Slurm's words: afterok:NAME, afterany:NAME, singleton
    script: str
    arguments: list[str]  # the script's own words
    time: str
    nodes: int
    ranks: int  # on all nodes together
    flags: Flags = field(default_factory=dict)  # of sbatch; none on this machine
    phase: str = ""  # of tokenize, where it is cut into several Jobs
    tasks: int = 1  # of a Job array

    @property
    def command(self) -> list[str]:
        """Return the line that starts it, with names in place of the ids that Slurm will give."""
        script = [self.script, *self.arguments]
        if not self.flags:
            return ["bash", *script]
        edges = [f"{kind}:<{name}>" if name else kind for kind, _, name in (e.partition(":") for e in self.after)]
        flags = self.flags | ({"dependency": ",".join(edges)} if edges else {})
        return ["sbatch", "--parsable", *option_words(flags), *script]


@dataclass(frozen=True)
class Plan:
    """All Jobs of a Run, the files that they source, and what was derived on the way."""

    run: str
    scheduler: str
    jobs: list[Job]
    alone: list[Job]  # that run only where they are asked for
    files: dict[str, str]  # path inside the Run -> text
    derived: dict[str, str]  # what -> value with its arithmetic
    segments: int = 1  # time limits that the training takes, as far as that is known

    def to_json(self) -> dict[str, Any]:
        jobs = {
            kind: [asdict(job) | {"command": job.command} for job in getattr(self, kind)] for kind in ("jobs", "alone")
        }
        return asdict(self) | jobs


@dataclass(frozen=True)
class Measured:
    """What a Run's earlier attempts tell about the rest of it."""

    step: int = 0  # that the newest checkpoint holds
    tokens_per_s: float | None = None
    save_seconds: float | None = None  # from the beginning of a save until it is on disk
    stall_seconds: float | None = None  # of it, that training stood still
    restart_seconds: float | None = None  # from the start of a job script to the first step


class MisfitError(UserError):
    """The Config asks for more than the Cluster has; what follows from the Config alone is known all the same."""

    def __init__(self, message: str, derived: dict[str, str]) -> None:
        super().__init__(message)
        self.derived = derived


def make_plan(config: Config, cluster: Cluster, run: Run, measured: Measured | None = None) -> Plan:
    """Compute the Plan of a whole chain. Nothing is read, written or run."""
    measured = measured or Measured()
    _check_ranks(config, cluster)
    segments = count_segments(config, cluster, measured)
    jobs: list[Job] = []
    for stage in STAGES:
        for segment in range(1, segments + 1) if stage == "pretrain" and segments > 1 else [0]:
            for phase in phases(stage, config, cluster):
                jobs.append(_job(config, cluster, run, measured, stage, segment, jobs, phase))
    alone = [replace(_job(config, cluster, run, measured, stage, 0, []), job_id="0") for stage in ALONE]
    files = {
        str(run.launch(stage).relative_to(run.root)): launch_file(stage, config, cluster, run)
        for stage in (*ALONE, *STAGES)
    }
    derived, needed = derive(config, cluster, measured), segments_needed(config, cluster, measured)
    return Plan(str(run.root), cluster.scheduler, jobs, alone, files, derived, needed)


def _check_ranks(config: Config, cluster: Cluster) -> None:
    nodes, ranks = config.pretrain.nodes, config.pretrain.nproc_per_node
    if cluster.scheduler == "local" and nodes > 1:
        raise MisfitError(
            f"pretrain.nodes: {nodes}, but this machine is one node; write 1, or give --cluster FILE", estimate(config)
        )
    if cluster.scheduler == "local" and cluster.cores and ranks > cluster.cores:
        raise MisfitError(
            f"pretrain.nproc_per_node: {ranks} ranks, but this machine has {cluster.cores} cores; "
            f"write {cluster.cores} or fewer, or give --cluster FILE",
            estimate(config),
        )
    if cluster.gpus_per_node and ranks > cluster.gpus_per_node:
        raise MisfitError(
            f"pretrain.nproc_per_node: {ranks} ranks, but a node of {cluster.name} has {cluster.gpus_per_node} GPUs; "
            f"write {cluster.gpus_per_node} or fewer",
            estimate(config),
        )


def _job(
    config: Config,
    cluster: Cluster,
    run: Run,
    measured: Measured,
    stage: str,
    segment: int,
    before: list[Job],
    phase: str = "",
) -> Job:
    name = f"{stage}-{segment}" if segment else phase or stage
    nodes = config.pretrain.nodes if stage in PARALLEL else 1
    on_slurm = cluster.scheduler == "slurm"
    return Job(
        name=name,
        job_id=str(len(before) + 1),
        stage=stage,
        segment=segment,
        after=edges(stage, before) if on_slurm else local_edges(stage, before),
        script=str(run.snapshot / "sbatch" / f"{stage}.sbatch"),
        arguments=[str(run.root), *([phase] if phase else [])],
        time=getattr(config, stage).time,
        nodes=nodes,
        ranks=nodes * config.pretrain.nproc_per_node if stage in PARALLEL else 1,
        flags=job_flags(stage, config, cluster, run, save_seconds=measured.save_seconds, phase=phase)
        if on_slurm
        else {},
        phase=phase,
        tasks=config.tokenize.array_tasks if phase == ARRAY_PHASE else 1,
    )


def phases(stage: str, config: Config, cluster: Cluster) -> tuple[str, ...]:
    """Return the phases of a Stage that are Jobs of their own; one without a name where the Stage is a single Job."""
    several = stage == "tokenize" and cluster.scheduler == "slurm" and config.tokenize.array_tasks > 1
    return TOKENIZE_PHASES if several else ("",)


NEEDS = {"pretrain": "tokenize", "evaluate": "pretrain", "inference": "pretrain"}  # complete, before a Stage works


def edges(stage: str, before: list[Job]) -> list[str]:
    """Return a Job's edges to those before it, in Slurm's words.

    pretrain needs tokenize to have succeeded. A Segment follows however the one before it ended (a time limit is no
    success, and a child by afterok would be cancelled by it), and `singleton` lets one of them work at a time. evaluate
    and inference follow the newest Segment however it ends, and leave at once where training is not complete: an edge
    that asks for success fails for good with the first Segment that runs into its limit.
    """
    if before and before[-1].stage == stage and before[-1].phase:
        return [f"afterok:{before[-1].name}"]
    last = [job.name for job in before if job.stage == NEEDS.get(stage)][-1:]
    if stage != "pretrain":
        return [f"afterany:{name}" for name in last]
    former = [f"afterany:{before[-1].name}"] if before and before[-1].stage == stage else []
    return [*(f"afterok:{name}" for name in last), *former, "singleton"]


def local_edges(stage: str, before: list[Job]) -> list[str]:
    """Return the same for this machine, where one Job runs at a time and the first failure ends the chain."""
    return [f"afterok:{name}" for name in [job.name for job in before if job.stage == NEEDS.get(stage)][-1:]]


def count_segments(config: Config, cluster: Cluster, measured: Measured) -> int:
    """Return how many Segments are queued beforehand: one, which sees to the next, where nodes may submit.

    Elsewhere as many as the key says, or as the speed that was measured asks for.
    """
    if cluster.scheduler == "local" or cluster.nodes_may_submit:
        return 1
    return segments_needed(config, cluster, measured)


def segments_needed(config: Config, cluster: Cluster, measured: Measured) -> int:
    """Return how many time limits the training takes, as far as that is known; else what the key says, or one."""
    if config.pretrain.segments is not None:
        return config.pretrain.segments
    if measured.tokens_per_s is None:
        return 1
    return max(1, min(MOST_SEGMENTS, math.ceil(_seconds_left(config, measured) / _useful_seconds(config, cluster))))


def _seconds_left(config: Config, measured: Measured) -> float:
    steps = max(0, config.pretrain.max_steps - measured.step)
    return steps * sizes.tokens_per_step(config) / (measured.tokens_per_s or math.inf)


def _useful_seconds(config: Config, cluster: Cluster) -> float:
    """Return how long one Segment trains: its time limit without start-up and the lead of the warning."""
    limit = time_seconds(config.pretrain.time)
    return max(60.0, limit - START_SECONDS - signal_lead(cluster, None))


def derive(config: Config, cluster: Cluster, measured: Measured) -> dict[str, str]:
    """List the values that follow from the Config, each with its arithmetic."""
    pretrain = config.pretrain
    derived = estimate(config)
    if cluster.cores:
        threads = config.threads or max(1, cluster.cores // pretrain.nproc_per_node)
        derived["CPU threads"] = (
            f"{threads} per rank = {cluster.cores} cores / {pretrain.nproc_per_node} ranks"
            if config.threads is None
            else f"{threads} per rank, as the key threads says"
        )
    return derived | (_derive_segments(config, cluster, measured) if cluster.scheduler == "slurm" else {})


def _derive_segments(config: Config, cluster: Cluster, measured: Measured) -> dict[str, str]:
    pretrain, segments = config.pretrain, segments_needed(config, cluster, measured)
    if pretrain.segments is not None:
        why = "as the key pretrain.segments says"
    elif measured.tokens_per_s is None:
        why = "no speed was measured yet"
    else:
        left, useful = _seconds_left(config, measured), _useful_seconds(config, cluster)
        speed = f"{measured.tokens_per_s:,.0f} tokens/s"
        why = f"{left / 3600:.1f} h left at {speed} / {useful / 3600:.1f} h that each trains"
    how = "each queues the next when it begins" if cluster.nodes_may_submit else "all queued beforehand"
    derived = {"Segments": f"{segments}: {why}; {how}"}
    lead = signal_lead(cluster, measured.save_seconds)
    derived["warning"] = f"{lead} s before the time limit; Slurm may send it up to 60 s early"
    if gpus := gpus_of("pretrain", config, cluster):
        hours = segments * pretrain.nodes * gpus * time_seconds(pretrain.time) / 3600
        bound = f"{cluster.max_gpu_hours:,.1f}" if cluster.max_gpu_hours else "not set"
        derived["GPU-hours"] = (
            f"{hours:,.1f} = {segments} Segments x {pretrain.nodes} nodes x {gpus} GPUs x {pretrain.time}; "
            f"more where they are requeued, up to max_gpu_hours ({bound})"
        )
    return derived | _derive_reliability(config, cluster, measured) | _derive_survival(config, cluster, measured)


def _derive_reliability(config: Config, cluster: Cluster, measured: Measured) -> dict[str, str]:
    """Estimate what failures will cost, and how often to save because of them; needs a measured speed."""
    if not measured.tokens_per_s:
        return {}
    pretrain = config.pretrain
    step = sizes.tokens_per_step(config) / measured.tokens_per_s
    days = cluster.node_mtbf_days / pretrain.nodes
    restart = (measured.restart_seconds or START_SECONDS) + REQUEUE_SECONDS
    reliability = Reliability(days * DAY, measured.stall_seconds or 0.1, restart, measured.save_seconds or 0.0)
    share = reliability.share(pretrain.save_interval * step)
    best = max(1, round(reliability.best_interval() / step))
    left = _seconds_left(config, measured)
    return {
        "failures": f"one in {days:,.1f} days = node_mtbf_days {cluster.node_mtbf_days:g} / {pretrain.nodes} nodes; "
        f"each costs {restart:,.0f} s of restart and the steps since the last save",
        "effective time": f"{share:.2%} with save_interval {pretrain.save_interval}; best is every {best:,} steps "
        f"({reliability.share(best * step):.2%})",
        "days left": f"{left / DAY / max(share, 1e-9):,.2f} = {left / DAY:,.2f} of training / {share:.2%}, "
        "queue not counted",
    }


def _derive_survival(config: Config, cluster: Cluster, measured: Measured) -> dict[str, str]:
    """Say how likely the chain's own rules end it though nothing but random failures happens."""
    pretrain, guess = config.pretrain, ""
    if measured.tokens_per_s:
        left = _seconds_left(config, measured)
        step = sizes.tokens_per_step(config) / measured.tokens_per_s
    elif pretrain.segments:
        left = pretrain.segments * _useful_seconds(config, cluster)
        step, guess = left / pretrain.max_steps, "; if training takes all of its Segments"
    else:
        return {}
    start = measured.restart_seconds or START_SECONDS
    first_save = start + pretrain.save_interval * step + (measured.save_seconds or 0.0)
    mean = cluster.node_mtbf_days * DAY / pretrain.nodes
    survival = Survival(mean, first_save, left, cluster.max_restarts_without_progress)
    return {"own rules": survival_text(survival) + guess}


def gpu_hours(config: Config, cluster: Cluster, plan: Plan) -> float:
    """Return the most GPU-hours that the Plan's Jobs, and the Segments that follow them, use within their limits."""

    def hours(job: Job) -> float:
        times = plan.segments if job.stage == "pretrain" and not job.segment else 1
        return times * job.nodes * gpus_of(job.stage, config, cluster) * time_seconds(job.time) / 3600

    return sum(map(hours, plan.jobs))
