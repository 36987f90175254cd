"""The launch file of a Stage: the bash that its job script sources."""

from __future__ import annotations

import shlex

from pipeline.cluster import Cluster
from pipeline.config import Config
from pipeline.flags import PARALLEL, gpus_of
from pipeline.run import Run
from pipeline.slurm_options import option_words

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


def launch_file(stage: str, config: Config, cluster: Cluster, run: Run) -> str:
    """Write assignments, the array LAUNCH, and the exports of every rank.

    What only the allocation can know stays a `${SLURM_…}`.
    """
    slurm = cluster.scheduler == "slurm"
    ranks = config.pretrain.nproc_per_node if stage in PARALLEL else 1
    lines = [
        f"# Written by plan, sourced by sbatch/{stage}.sbatch.",
        f"SCHEDULER={cluster.scheduler}",
        f"PYTHON={shlex.quote(cluster.host_python)}",
        *(_slurm_launch(stage, ranks, config, cluster, run) if slurm else _local_launch(stage, ranks, cluster)),
        f"unset {' '.join(FOREIGN_VARIABLES)}",
        f"export PYTHONPATH={shlex.quote(str(run.snapshot))}",
        "export PYTHONSAFEPATH=1",  # or `-m` would find `pipeline` in the folder that the script was called from
        "export PYTHONUTF8=1",
        "export PYTHONDONTWRITEBYTECODE=1",
    ]
    if ranks > 1:
        lines.append("export OMP_NUM_THREADS=1")  # or torchrun says so at length; each rank sets its own number later
    if ranks > 1 and not slurm:
        lines.append("export GLOO_SOCKET_IFNAME=lo")  # one machine: whatever its name resolves to
    if stage == "pretrain":
        lines.append(f"export TORCHINDUCTOR_CACHE_DIR={shlex.quote(str(run.root / 'cache' / 'inductor'))}")
    if stage != "tokenize":
        lines.append("export HF_HUB_OFFLINE=1")  # only tokenize may download
    if slurm and stage in PARALLEL and (gpus := gpus_of(stage, config, cluster)):
        lines.append(f"export PIPELINE_GPUS_PER_NODE={gpus}")
    environment = cluster.environment() if slurm else {}
    lines += [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    if environment:
        # Each rank compares what reached it with what was exported here.
        checked = [f"{name}={value}" for name, value in environment.items()]
        lines.append(f"export PIPELINE_EXPECTED_ENV={shlex.quote(chr(10).join(checked))}")
    return "\n".join(lines) + "\n"


def _local_launch(stage: str, ranks: int, cluster: Cluster) -> list[str]:
    python = [cluster.python, "-u"]
    if ranks > 1:
        python = [cluster.python, *TORCHRUN, "--standalone", f"--nproc-per-node={ranks}", *python]
    first = ["PREFLIGHT=()"] if stage == "pretrain" else []  # this machine needs no look before each start
    return [*first, f"LAUNCH=({shlex.join(python)})"]


def _slurm_launch(stage: str, ranks: int, config: Config, cluster: Cluster, run: Run) -> list[str]:
    """Start one torchrun per node by sbatch/node.sh, or one rank per task; a Stage of one process by srun alone."""
    python = [cluster.python, "-u"]
    rank = ["bash", str(run.snapshot / "sbatch" / "rank.sh"), *python]
    if stage == "preflight":
        return [_srun("LAUNCH", stage, ranks, config, cluster, rank)]
    if stage != "pretrain":
        return [_srun("LAUNCH", stage, 1, config, cluster, python)]
    # Preflight comes first, in the same allocation. Its ranks are started by srun even where torchrun starts those of
    # training: a node that torchrun cannot reach would end in torchrun's own time-out, and nobody would name it.
    first = [_srun("PREFLIGHT", "preflight", ranks, config, cluster, rank)] if config.preflight.enabled else []
    first = first or ["PREFLIGHT=()"]
    if cluster.launcher == "srun":
        return [*first, _srun("LAUNCH", stage, ranks, config, cluster, rank)]
    torchrun = [cluster.python, *TORCHRUN, f"--nproc-per-node={ranks}"]
    node = ["bash", str(run.snapshot / "sbatch" / "node.sh")]
    words = f'{shlex.join(node)} "${{TORCHRUN[@]}}" -- {shlex.join(python)}'
    return [*first, f"TORCHRUN=({shlex.join(torchrun)})", _srun("LAUNCH", stage, 1, config, cluster, words)]


def _srun(array: str, stage: str, per_node: int, config: Config, cluster: Cluster, program: list[str] | str) -> str:
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
    ]
    # srun does not take --cpus-per-task from sbatch since 22.05. Preflight's tasks share the CPUs of one.
    cpus = '--cpus-per-task="${SLURM_CPUS_PER_TASK:-1}"' if stage != "preflight" else "--cpus-per-task=1 --overcommit"
    return f"{array}=({shlex.join(words)} {cpus} {program if isinstance(program, str) else shlex.join(program)})"
