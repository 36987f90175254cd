"""The launch file of a Stage: the bash that its job script sources."""

from __future__ import annotations

import json
import shlex

from pipeline.cluster.schema import Cluster
from pipeline.config.schema import Config
from pipeline.image.container import container_options
from pipeline.plan.flags import PARALLEL, gpus_of
from pipeline.run.folder import Run
from pipeline.slurm.options import option_words

# A stop signal that reaches torchrun goes on to the ranks, which save and end by themselves; by default it knows no
# USR2, dies of it and leaves them behind. Ranks that hang are not waited for: their watchdogs end them.
TORCHRUN_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR2"
SAVE_SECONDS = 600
TORCHRUN = (
    f"-m torch.distributed.run --max-restarts=0 --no-python "
    f"--signals-to-handle={TORCHRUN_SIGNALS} --shutdown-timeout={SAVE_SECONDS}"
).split()

# srun does not take --cpus-per-task from sbatch since 22.05.
CPUS = '--cpus-per-task="${SLURM_CPUS_PER_TASK:-1}"'

# What a parent job or torchrun may have left in the environment; a Run must not take it for its own.
FOREIGN_VARIABLES = (
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK NODE_RANK MASTER_ADDR MASTER_PORT "
    "TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS PYTHONHOME"
).split()


# Set by sbatch/lib.sh; in a container they win over the image's own.
FROM_THE_ALLOCATION = (
    "MASTER_ADDR MASTER_PORT PIPELINE_STAGE PIPELINE_PHASE PIPELINE_TASK PIPELINE_JOB_ID PIPELINE_ATTEMPT "
    "PIPELINE_STARTED PIPELINE_NODES"
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
        *_watch(stage, config, cluster),
        *_launch(stage, config, cluster, run, exports),
        *_image_cache(stage, config, cluster),
        f"unset {' '.join(FOREIGN_VARIABLES)}",
        *(f"export {name}={shlex.quote(value)}" for name, value in exports.items()),
        *_secrets(cluster),
    ]
    return "\n".join(lines) + "\n"


def _watch(stage: str, config: Config, cluster: Cluster) -> list[str]:
    """Have the batch shell of pretrain look for checkpoints that evaluate Jobs are to be submitted for."""
    watches = stage == "pretrain" and cluster.scheduler == "slurm" and cluster.nodes_may_submit
    return ["WATCH=1"] if watches and config.evaluate.beside_training else []


def _secrets(cluster: Cluster) -> list[str]:
    """Have the job script read the file of secrets, so that no value is ever written into a Run."""
    if not cluster.secret_file:
        return []
    return ["set -a", "# shellcheck source=/dev/null", f"source {shlex.quote(cluster.secret_file)}", "set +a"]


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


def _launch(stage: str, config: Config, cluster: Cluster, run: Run, exports: dict[str, str]) -> list[str]:
    if cluster.scheduler == "slurm":
        return _slurm_launch(stage, config, cluster, run, exports)
    return _local_launch(stage, config.pretrain.nproc_per_node if stage in PARALLEL else 1, cluster)


def _local_launch(stage: str, ranks: int, cluster: Cluster) -> list[str]:
    python = [cluster.python, "-u"]
    if ranks > 1:
        python = [cluster.python, *TORCHRUN, "--standalone", f"--nproc-per-node={ranks}", *python]
    first = ["PREFLIGHT=()"] if stage == "pretrain" else []  # this machine needs no look before each start
    return [*first, f"LAUNCH=({shlex.join(python)})"]


def _slurm_launch(stage: str, config: Config, cluster: Cluster, run: Run, exports: dict[str, str]) -> list[str]:
    """Start one torchrun per node by sbatch/node.sh, or one rank per task; a Stage of one process by srun alone."""
    ranks = config.pretrain.nproc_per_node
    # Pyxis would take each further line of a value for a variable of its own. It passes unnamed all the same, unless
    # the image has one of this name.
    named = [name for name, value in exports.items() if "\n" not in value]
    container = container_options(config, cluster, run, [*named, *cluster.secret_env, *FROM_THE_ALLOCATION])

    def srun(array: str, stage: str, per_node: int, program: list[str] | str) -> str:
        return _srun(array, stage, per_node, config, cluster, container, program)

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
    nodes = config.pretrain.nodes if stage in PARALLEL else 1
    words = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
    words += [*option_words(cluster.srun_options(stage, getattr(config, stage)))]
    program = shlex.join([cluster.host_python, "-m", "pipeline.image.cache"])
    return [f"IMAGE_CACHE={shlex.quote(cluster.image_cache)}", f"CACHE_IMAGE=({shlex.join(words)} {CPUS} {program})"]


def _srun(
    array: str,
    stage: str,
    per_node: int,
    config: Config,
    cluster: Cluster,
    container: list[str],
    program: list[str] | str,
) -> str:
    """Write the array of words that starts `program`, `per_node` times on each node of the Stage."""
    nodes = config.pretrain.nodes if stage in PARALLEL else 1
    words = [
        "srun",
        # The first task to fail ends the others; the ranks' own watchdogs would take minutes.
        "--kill-on-bad-exit=1",
        f"--nodes={nodes}",
        f"--ntasks={nodes * per_node}",
        f"--ntasks-per-node={per_node}",
        *option_words(cluster.srun_options(stage, getattr(config, stage))),
        *container,
    ]
    # Preflight's tasks share the CPUs of one.
    cpus = CPUS if stage != "preflight" else "--cpus-per-task=1 --overcommit"
    return f"{array}=({shlex.join(words)} {cpus} {program if isinstance(program, str) else shlex.join(program)})"
