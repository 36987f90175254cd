"""The environment of Slurm's commands and of Jobs: this process's, without what is not meant for them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

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

# What of a shell a Job needs: who and where one is, what a site's modules have set, where caches are, how the network
# is reached. Anything else stays: Slurm keeps a Job's environment on its controller's disk, and hands it to every node.
OF_A_JOB = frozenset(
    (
        "HOME USER LOGNAME SHELL PATH LANG LANGUAGE TZ TERM TMPDIR SCRATCH WORK PROJECT KRB5CCNAME "
        "LD_LIBRARY_PATH LIBRARY_PATH CPATH BASH_ENV ENV CC CXX CONDA_PREFIX VIRTUAL_ENV LOCALE_ARCHIVE "
        "MODULEPATH MODULESHOME MODULESHOME_modshare MODULEPATH_ROOT MODULES_CMD LOADEDMODULES _LMFILES_ "
        "XDG_CACHE_HOME XDG_CONFIG_HOME XDG_DATA_HOME "
        "HF_HOME HF_HUB_CACHE HF_DATASETS_CACHE HF_ENDPOINT HF_XET_CACHE WANDB_BASE_URL WANDB_ENTITY WANDB_PROJECT "
        "WANDB_MODE WANDB_DIR SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE"
    ).split()
)
PREFIXES_OF_A_JOB = (
    *"LC_ LMOD_ __LMOD _ModuleTable BASH_FUNC_ml% BASH_FUNC_module% BASH_FUNC__module".split(),
    *"NCCL_ UCX_ FI_ GLOO_ OMP_ MKL_ CUDA ROCM_ HIP_ TORCH ENROOT_".split(),
)
PROXIES = frozenset("http_proxy https_proxy ftp_proxy all_proxy no_proxy".split())


def clean_environment() -> dict[str, str]:
    """Return this process's environment without what other jobs and people's shells tell Slurm's commands."""
    keep = KEPT if "SLURM_JOB_ID" in os.environ else KEPT | {TOKEN}
    kept = {name: value for name, value in os.environ.items() if name in keep or not FOREIGN.match(name)}
    return kept | {"LC_ALL": "C"}


def job_environment(named: Iterable[str] = ()) -> dict[str, str]:
    """Return what of this process's environment a Job gets: what every Job needs, and the variables `named`.

    It is the environment of sbatch itself. By its option --export=NAME,… Slurm would first let a login shell on the
    node say what else there is, which is slow where it works.
    """
    wanted = {*named, *KEPT, TOKEN}
    return {name: value for name, value in clean_environment().items() if name in wanted or _is_of_a_job(name, value)}


def _is_of_a_job(name: str, value: str) -> bool:
    if name.lower() in PROXIES:
        return "@" not in value  # or it holds a password
    return name in OF_A_JOB or name.startswith(PREFIXES_OF_A_JOB)
