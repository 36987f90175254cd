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
        f"--output={output_pattern(str(run.logs), stage, '%A_%a' if phase == ARRAY_PHASE else '%j')}",
        f"--chdir={run.root}",
        f"--nodes={config.pretrain.nodes if parallel else 1}",
        f"--ntasks-per-node={tasks}",
        f"--time={getattr(config, stage).time}",
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


def output_pattern(logs: str, stage: str, job: str) -> str:
    r"""Return --output for a Job's own log; `job` is sbatch's pattern for its number.

    A % in a folder's name is doubled. A path that holds one backslash anywhere is taken literally, but for its
    backslashes, of which the first of each pair is dropped: then the Jobs of a Stage append to one file.
    """
    if "\\" in logs:
        return logs.replace("\\", "\\\\") + f"/{stage}.slurm.log"
    return logs.replace("%", "%%") + f"/{stage}-{job}.slurm.log"
