"""Every srun line of the product is written here: in a Job's allocation, or with an allocation of its own."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence

from pipeline.cluster.schema import Cluster
from pipeline.config.schema import Config
from pipeline.plan.flags import PARALLEL, gpus_of
from pipeline.slurm.options import option_words

# srun does not take --cpus-per-task from sbatch since 22.05. Where the Job asked for none, the step must not either:
# with --cpus-per-task=1 it gets one CPU of a whole node and that CPU's share of the memory; without it, all of the Job.
CPUS = '${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"}'

# sbatch takes these and srun does not.
SBATCH_ONLY = frozenset("batch export-file get-user-env ignore-pbs wait-all-nodes".split())


def srun_words(
    stage: str,
    config: Config,
    cluster: Cluster,
    container: Iterable[str],
    *,
    own: Sequence[str] = (),
    nodes: int | None = None,
    per_node: int = 1,
    allocation: Mapping[str, str] | None = None,
) -> list[str]:
    """Return srun's words up to the program, which it starts `per_node` times on each node of the Stage.

    `container` is empty only for what must run on the nodes themselves. `own` are options of this line, `allocation`
    those of sbatch where no Job surrounds it; the cluster file's and the config's options of srun win over these.
    """
    if nodes is None:
        nodes = config.pretrain.nodes if stage in PARALLEL else 1
    options = dict(allocation or {}) | cluster.srun_options(stage, getattr(config, stage))
    shape = [f"--nodes={nodes}", f"--ntasks={nodes * per_node}", f"--ntasks-per-node={per_node}"]
    return ["srun", *own, *shape, *option_words(options), *container]


def step_array(array: str, words: list[str], program: list[str] | str, cpus: str = CPUS) -> str:
    """Write the bash array of a step in a Job: `words` and then `program`, which may be bash itself."""
    last = program if isinstance(program, str) else shlex.join(program)
    return f"{array}=({' '.join(filter(None, (shlex.join(words), cpus, last)))})"


def own_allocation(stage: str, config: Config, cluster: Cluster) -> dict[str, str]:
    """Return the options with which sbatch would ask for a Stage's Job, for an srun that asks by itself."""
    found = cluster.sbatch_options(stage, getattr(config, stage), gpus_of(stage, config, cluster))
    return {name: value for name, value in found.items() if name not in SBATCH_ONLY}
