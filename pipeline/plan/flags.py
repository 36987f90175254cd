"""The options of a Job's sbatch line."""

from __future__ import annotations

from pipeline.cluster.schema import Cluster
from pipeline.config.schema import Config
from pipeline.run.folder import Run
from pipeline.slurm.options import option_words

TOKENIZE_PHASES = ("tokenizer", "encode", "index")  # Jobs of their own where an array shares the middle one
ARRAY_PHASE = "encode"
PARALLEL = ("preflight", "pretrain")  # on all nodes, with all ranks
GPU_STAGES = (*PARALLEL, "evaluate", "inference")
SAVES = 3  # that fit into the lead of the warning: one that is under way, the last one, and one for a busy file system


def sbatch_flags(
    stage: str,
    segment: int,
    config: Config,
    cluster: Cluster,
    run: Run,
    save_seconds: float | None = None,
    *,
    phase: str = "",
) -> list[str]:
    """Return a Job's options, without its dependency and its comment, which are known when it is submitted."""
    parallel = stage in PARALLEL
    tasks = config.pretrain.nproc_per_node if stage == "pretrain" and cluster.launcher == "srun" else 1
    flags = [
        f"--job-name={run.name}-{phase or stage}" + (f"-{segment}" if segment else ""),
        # What the script says before it opens its attempt's own log, and what Slurm itself says.
        f"--output={_escape(str(run.logs))}/{stage}-{'%A_%a' if phase == ARRAY_PHASE else '%j'}.slurm.log",
        f"--chdir={run.root}",
        f"--nodes={config.pretrain.nodes if parallel else 1}",
        f"--ntasks-per-node={tasks}",
        f"--time={getattr(config, stage).time}",
        *([f"--time-min={least}"] if stage == "pretrain" and (least := config.pretrain.time_min) else []),
        f"--signal=B:USR2@{signal_lead(cluster, save_seconds)}",
    ]
    if phase == ARRAY_PHASE:
        flags.append(array_flag(config.tokenize.array_tasks, config.tokenize.max_running_tasks))
    gpus = gpus_of(stage, config, cluster)
    return flags + option_words(cluster.sbatch_options(stage, getattr(config, stage), gpus))


def array_flag(tasks: int, at_a_time: int | None) -> str:
    """Return the option that makes a Job an array of `tasks`, of which at most `at_a_time` run together."""
    return f"--array=0-{tasks - 1}" + (f"%{at_a_time}" if at_a_time else "")


def gpus_of(stage: str, config: Config, cluster: Cluster) -> int:
    """Return the GPUs that a Stage's Job asks for on each of its nodes."""
    if not cluster.gpus_per_node or stage not in GPU_STAGES:
        return 0
    return config.pretrain.nproc_per_node if stage in PARALLEL else 1


def signal_lead(cluster: Cluster, save_seconds: float | None) -> int:
    """Return how many seconds before its end a Job is warned: the cluster file's, or more where saves are slow."""
    return max(cluster.signal_lead, round(SAVES * (save_seconds or 0)))


def _escape(path: str) -> str:
    """Keep sbatch from reading a % in a folder's name as one of its own."""
    return path.replace("%", "%%")
