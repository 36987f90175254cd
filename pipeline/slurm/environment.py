"""The environment of Slurm's commands: this process's, without what other jobs and people's shells tell them."""

from __future__ import annotations

import os
import re

# What a parent job or a person's shell tells Slurm's commands: columns, filters, resources. None of it is for us.
FOREIGN = re.compile(r"(SLURM|SBATCH|SRUN|SALLOC|SQUEUE|SACCT|SINFO|SCANCEL|SCONTROL|SPRIO|SSHARE|PIPELINE|PYXIS)_|PMI")
KEPT = frozenset({"SLURM_CONF"})
TOKEN = "SLURM_JWT"  # by which a person's commands are let in; a Job that inherits it would ask with one that expired
# The same for commands that run elsewhere, where only names can be taken away.
FOREIGN_NAMES = (
    "SQUEUE_FORMAT SQUEUE_FORMAT2 SQUEUE_ACCOUNT SQUEUE_ALL SQUEUE_ARRAY SQUEUE_CLUSTERS SQUEUE_NAMES SQUEUE_PARTITION "
    "SQUEUE_QOS SQUEUE_SORT SQUEUE_STATES SQUEUE_USERS SACCT_FORMAT SINFO_FORMAT SINFO_PARTITION SINFO_SORT "
    "SLURM_CLUSTERS SLURM_TIME_FORMAT SLURM_JOB_ID SLURM_MEM_PER_CPU SLURM_MEM_PER_NODE SLURM_EXPORT_ENV "
    "SBATCH_PARTITION SBATCH_ACCOUNT SBATCH_QOS SBATCH_TIMELIMIT SBATCH_EXPORT SBATCH_ARRAY_INX "
    "PYXIS_CONTAINER_IMAGE PYXIS_CONTAINER_NAME"
).split()


def clean_environment() -> dict[str, str]:
    """Return this process's environment without what other jobs and people's shells tell Slurm's commands."""
    keep = KEPT if "SLURM_JOB_ID" in os.environ else KEPT | {TOKEN}
    kept = {name: value for name, value in os.environ.items() if name in keep or not FOREIGN.match(name)}
    return kept | {"LC_ALL": "C"}
