"""The launch file of a Stage: the bash that its job script sources."""

from __future__ import annotations

import json
import shlex

from pipeline.cluster.schema import Cluster
from pipeline.config.schema import Config
from pipeline.image.container import container_options
from pipeline.plan.flags import PARALLEL, gpus_of
from pipeline.plan.srun import srun_words, step_array
from pipeline.run.folder import Run

# A stop signal that reaches torchrun goes on to the ranks, which save and end by themselves; by default it knows no
# USR2, dies of it and leaves them behind. Ranks that hang are not waited for: their watchdogs end them.
TORCHRUN_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR2"
SAVE_SECONDS = 600
TORCHRUN = (
    f"-m torch.distributed.run --max-restarts=0 --no-python "
    f"--signals-to-handle={TORCHRUN_SIGNALS} --shutdown-timeout={SAVE_SECONDS}"
).split()

# What a parent job or torchrun may have left in the environment; a Run must not take it for its own.
FOREIGN_VARIABLES = (
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK NODE_RANK MASTER_ADDR MASTER_PORT "
    "TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS PYTHONHOME"
).split()


# Set by sbatch/lib.sh; in a container they win over the image's own.
FROM_THE_ALLOCATION = (
    "MASTER_ADDR MASTER_PORT PIPELINE_STAGE PIPELINE_PHASE PIPELINE_TASK PIPELINE_JOB_ID PIPELINE_ATTEMPT "
    "PIPELINE_STARTED PIPELINE_NODES PIPELINE_BATCH_NODE"
).split()


def launch_file(stage: str, config: Config, cluster: Cluster, run: Run) -> str:
    """Write assignments, the arrays of words that start programs, and the exports of every rank.

    What only the allocation can know stays a `${SLURM_…}`.
    """
    exports = _exports(stage, config, cluster, run)
    lines = [
        f"# Written by plan, sourced by sbatch/{stage}.sbatch.",
        f"SCHEDULER={cluster.scheduler}",
        f"PYTHON={shlex.quote(cluster.host_python)}",
        *_may_submit(stage, config, cluster),
        *_launch(stage, config, cluster, run),
        *_image_cache(stage, config, cluster),
        f"unset {' '.join(FOREIGN_VARIABLES)}",
        *(f"export {name}={shlex.quote(value)}" for name, value in exports.items()),
        *_secrets(cluster),
    ]
    return "\n".join(lines) + "\n"


def _may_submit(stage: str, config: Config, cluster: Cluster) -> list[str]:
    """Say where the job script may call Slurm's commands, and whether pretrain's has evaluate Jobs submitted."""
    if cluster.scheduler != "slurm" or not cluster.nodes_may_submit:
        return []
    return ["MAY_SUBMIT=1", *(["EVALUATE_BESIDE=1"] if stage == "pretrain" and config.evaluate.beside_training else [])]


def _secrets(cluster: Cluster) -> list[str]:
    """Name what becomes a step's srun with the secrets of the file: no other process of the Job has them."""
    if not cluster.secret_file:
        return ["SECRETS=()"]
    words = [cluster.host_python, "-m", "pipeline.cluster.secret_file", cluster.secret_file]
    return [f"SECRETS=({shlex.join(words)})"]


def _exports(stage: str, config: Config, cluster: Cluster, run: Run) -> dict[str, str]:
    """Return the environment of a Stage's processes, beside what the allocation tells them."""
    slurm, parallel = cluster.scheduler == "slurm", stage in PARALLEL
    several = parallel and config.pretrain.nproc_per_node > 1
    exports = {"PYTHONPATH": str(run.snapshot)}
    exports["PYTHONSAFEPATH"] = "1"  # a folder named pipeline where the script was called must not come first
    exports |= {"PYTHONUTF8": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    if several:
        exports["OMP_NUM_THREADS"] = "1"  # or torchrun says so at length; each rank sets its own number later
    if several and not slurm:
        exports["GLOO_SOCKET_IFNAME"] = "lo"  # one machine: whatever its name resolves to
    if stage == "pretrain":
        exports["TORCHINDUCTOR_CACHE_DIR"] = str(run.compile_cache)
    if stage == "inference":
        exports["GOMP_SPINCOUNT"] = "20000"  # native.c's threads meet often; longer, they would wait for busy cores
    if stage != "tokenize":
        exports["HF_HUB_OFFLINE"] = "1"  # only tokenize may download
    if not slurm:
        return exports
    if parallel and (gpus := gpus_of(stage, config, cluster)):
        exports["PIPELINE_GPUS_PER_NODE"] = str(gpus)
    if cluster.image:
        exports["PIPELINE_IMAGE"] = cluster.image  # preflight looks whether its ranks are in one
    environment = cluster.environment()
    # Each rank compares what reached it with what was exported here.
    expected = json.dumps(environment, ensure_ascii=False)
    return exports | environment | ({"PIPELINE_EXPECTED_ENV": expected} if environment else {})


def stage_container(stage: str, config: Config, cluster: Cluster, run: Run) -> list[str]:
    """Return srun's container options for the processes of a Stage; none where it runs without an image."""
    # Pyxis would take each further line of a value for a variable of its own. It passes unnamed all the same, unless
    # the image has one of this name.
    named = [name for name, value in _exports(stage, config, cluster, run).items() if "\n" not in value]
    return container_options(config, cluster, run, [*named, *cluster.secret_env, *FROM_THE_ALLOCATION])


def _launch(stage: str, config: Config, cluster: Cluster, run: Run) -> list[str]:
    if cluster.scheduler == "slurm":
        return _slurm_launch(stage, config, cluster, run)
    return _local_launch(stage, config.pretrain.nproc_per_node if stage in PARALLEL else 1, cluster)


def _local_launch(stage: str, ranks: int, cluster: Cluster) -> list[str]:
    python = [cluster.python, "-u"]
    if ranks > 1:
        python = [cluster.python, *TORCHRUN, "--standalone", f"--nproc-per-node={ranks}", *python]
    first = ["PREFLIGHT=()"] if stage == "pretrain" else []  # this machine needs no look before each start
    return [*first, f"LAUNCH=({shlex.join(python)})"]


def _slurm_launch(stage: str, config: Config, cluster: Cluster, run: Run) -> list[str]:
    """Start one torchrun per node by sbatch/node.sh, or one rank per task; a Stage of one process by srun alone."""
    ranks = config.pretrain.nproc_per_node
    container = stage_container(stage, config, cluster, run)

    def srun(array: str, stage: str, per_node: int, program: list[str] | str) -> str:
        # The first task to fail ends the others; the ranks' own watchdogs would take minutes.
        own = ["--kill-on-bad-exit=1"]
        if stage != "preflight":
            return step_array(array, srun_words(stage, config, cluster, container, own=own, per_node=per_node), program)
        own.append("--overcommit")  # its ranks share what training's one task per node will have
        words = srun_words(stage, config, cluster, container, own=own, per_node=per_node)
        return step_array(array, words, program, cpus="")

    python = [cluster.python, "-u"]
    rank = ["bash", str(run.snapshot / "sbatch" / "rank.sh"), *python]
    if stage == "preflight":
        return [srun("LAUNCH", stage, ranks, rank)]
    if stage != "pretrain":
        return [srun("LAUNCH", stage, 1, python)]
    # Preflight comes first, in the same allocation. Its ranks are started by srun even where torchrun starts those of
    # training: a node that torchrun cannot reach would end in torchrun's own time-out, and nobody would name it.
    first = [srun("PREFLIGHT", "preflight", ranks, rank)] if config.preflight.enabled else []
    first = first or ["PREFLIGHT=()"]
    if cluster.launcher == "srun":
        return [*first, srun("LAUNCH", stage, ranks, rank)]
    torchrun = [cluster.python, *TORCHRUN, f"--nproc-per-node={ranks}"]
    node = ["bash", str(run.snapshot / "sbatch" / "node.sh")]
    words = f'{shlex.join(node)} "${{TORCHRUN[@]}}" -- {shlex.join(python)}'
    return [*first, f"TORCHRUN=({shlex.join(torchrun)})", srun("LAUNCH", stage, 1, words)]


def _image_cache(stage: str, config: Config, cluster: Cluster) -> list[str]:
    """Name the folder of a node's own disk for the image, and what starts a copy to it, once on each node."""
    if cluster.image_cache is None:
        return []
    copy = [cluster.host_python, "-m", "pipeline.image.cache"]
    array = step_array("CACHE_IMAGE", srun_words(stage, config, cluster, ()), copy)
    return [f"IMAGE_CACHE={shlex.quote(cluster.image_cache)}", array]
