"""Start one srun beside the chain, with an allocation of its own and all that a Stage's processes find."""

from __future__ import annotations

import shutil
from pathlib import Path

from pipeline.cluster.schema import Cluster
from pipeline.cluster.secret_env import carried_names
from pipeline.config.schema import Config
from pipeline.errors import NotReadyError, UserError
from pipeline.hints import command
from pipeline.plan.launch import FOREIGN_VARIABLES, stage_container
from pipeline.plan.srun import own_allocation, srun_words
from pipeline.run.folder import Run
from pipeline.slurm.environment import clean_environment, job_environment

# $1 is the launch file of a Stage, $2 the code; what follows is started with the variables that the file exports.
START = """
set -euo pipefail
source "$1"
export PYTHONPATH=$2
exec ${{SECRETS[@]+"${{SECRETS[@]}}"}} {launch} "${{@:3}}"
"""
BY_LAUNCH = '"${LAUNCH[@]}"'


def own_step(stage: str, run: Run, config: Config, cluster: Cluster, own: list[str], program: list[str]) -> list[str]:
    """Return the srun line that runs `program` once, as the Jobs of a Stage are run: options, GPUs, memory, image."""
    container = stage_container(stage, config, cluster, run)
    allocation = own_allocation(stage, config, cluster) | ({"clusters": cluster.cluster} if cluster.cluster else {})
    return [*srun_words(stage, config, cluster, container, own=own, nodes=1, allocation=allocation), *program]


def with_launch_file(stage: str, run: Run, code: Path, words: list[str], launch: str = "") -> list[str]:
    """Return what starts `words` with the variables of a Stage's launch file, secrets included.

    With BY_LAUNCH they follow the file's own launch words: on this machine, the Run's interpreter.
    """
    if not run.launch(stage).is_file():
        raise UserError(f"{run.launch(stage)} is not there; have it written again: {command('resume', run.root)}")
    return ["bash", "-c", START.format(launch=launch), "bash", str(run.launch(stage)), str(code), *words]


def own_environment(cluster: Cluster) -> dict[str, str]:
    """Return what of this process's environment such a step gets: on this machine all but what other Jobs have left."""
    found = clean_environment() if cluster.scheduler == "local" else job_environment(carried_names(cluster))
    return {name: value for name, value in found.items() if name not in FOREIGN_VARIABLES}


def require_srun() -> None:
    """Refuse where there is none, before anything is started."""
    if shutil.which("srun") is None:
        raise NotReadyError("srun: no such command here; this needs Slurm's commands")
