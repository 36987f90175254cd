"""The options of a Job's sbatch line: an ordered mapping from option to value, which becomes words once."""

from __future__ import annotations

from pipeline.cluster.schema import Cluster
from pipeline.config.schema import Config
from pipeline.run.folder import Run
from pipeline.slurm.options import FLAG

Flags = dict[str, str]  # sbatch's option without dashes -> value, options.FLAG for one that takes none

TOKENIZE_PHASES = ("tokenizer", "encode", "index")  # Jobs of their own where an array shares the middle one
ARRAY_PHASE = "encode"
PARALLEL = ("preflight", "pretrain")  # on all nodes, with all ranks
GPU_STAGES = (*PARALLEL, "evaluate", "inference")
SAVES = 3  # that fit into the lead of the warning: one that is under way, the last one, and one for a busy file system
NO_ID = "<id>"  # in place of the Run's, before it has one


def job_flags(
    stage: str,
    config: Config,
    cluster: Cluster,
    run: Run,
    *,
    run_id: str = NO_ID,
    save_seconds: float | None = None,
    phase: str = "",
) -> Flags:
    """Return a Job's options, without its dependency and its comment, which are known when it is submitted."""
    parallel = stage in PARALLEL
    tasks = config.pretrain.nproc_per_node if stage == "pretrain" and cluster.launcher == "srun" else 1
    flags = {
        "job-name": job_name(run, phase or stage, run_id),
        # Slurm starts no Job whose output it cannot open; the script opens its logs itself, and can leave such a node.
        "output": "/dev/null",
        "chdir": str(run.root),
        **_requeued(stage, cluster),
        "nodes": str(config.pretrain.nodes if parallel else 1),
        "ntasks-per-node": str(tasks),
        "time": getattr(config, stage).time,
        **({"time-min": least} if stage == "pretrain" and (least := config.pretrain.time_min) else {}),
        "signal": f"B:USR2@{signal_lead(cluster, save_seconds)}",
    }
    if phase == ARRAY_PHASE:
        flags["array"] = array_range(config.tokenize.array_tasks, config.tokenize.max_running_tasks)
    return flags | cluster.sbatch_options(stage, getattr(config, stage), gpus_of(stage, config, cluster))


def _requeued(stage: str, cluster: Cluster) -> Flags:
    """Return whether Slurm puts the Job back by itself when a node dies or another Job wants the nodes.

    A Segment has a successor that starts at once. Slurm would hold the same Job for two minutes, and for ever where its
    launch fails ("launch failed requeued held"), as on a node that comes back while processes of the Job live on it.
    """
    return {"no-requeue" if stage == "pretrain" and cluster.nodes_may_submit else "requeue": FLAG}


def job_name(run: Run, kind: str, run_id: str) -> str:
    """Name the Jobs of one kind; all Segments of a Run share a name, by which Slurm runs one of them at a time.

    The id is in it because two Runs of one name, in two folders, must not wait for each other.
    """
    return f"{run.name}-{kind}-{run_id}"


def array_range(tasks: int, at_a_time: int | None) -> str:
    """Return what makes a Job an array of `tasks`, of which at most `at_a_time` run together."""
    return f"0-{tasks - 1}" + (f"%{at_a_time}" if at_a_time else "")


def gpus_of(stage: str, config: Config, cluster: Cluster) -> int:
    """Return the GPUs that a Stage's Job asks for on each of its nodes."""
    if not cluster.gpus_per_node or stage not in GPU_STAGES:
        return 0
    return config.pretrain.nproc_per_node if stage in PARALLEL else 1


def signal_lead(cluster: Cluster, save_seconds: float | None) -> int:
    """Return how many seconds before its end a Job is warned: the cluster file's, or more where saves are slow."""
    return max(cluster.signal_lead, round(SAVES * (save_seconds or 0)))
