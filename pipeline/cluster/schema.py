"""Where a Run happens: this machine or a Slurm cluster, and what its processes find there."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from pipeline.cluster.network import Environment, NcclDebug, Network, environment
from pipeline.cluster.parts import ABSOLUTE, CLUSTER, GPU_TYPE, GPUS, MEMORY, MOUNT, SECRET_NAME, Login, Options, Stages
from pipeline.config.checks import Rule
from pipeline.config.stage import StageSection
from pipeline.config.types import LINE, NAMED, REAL, WHOLE, AsTyped, Section
from pipeline.errors import UserError
from pipeline.slurm.commands import Mark, Slurm
from pipeline.slurm.options import SbatchOptions, SrunOptions

GPU_OPTIONS = ("gres", "gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket")
MEMORY_OPTIONS = ("mem", "mem-per-cpu", "mem-per-gpu")
OTHER_NAMES = {
    "gpus": "gpus_per_node",
    "gpu": "gpus_per_node",
    "memory": "mem",
    "cpus": "cores",
    "cpus_per_node": "cores",
    "environment": "env",
    "variables": "env",
    "fabric": "network",
    "interconnect": "network",
    "slurm": "sbatch",
    "backend": "scheduler",
    "executor": "scheduler",
    "ssh": "login",
}


class Cluster(Section):
    """A place to run Jobs: what differs between this machine, a test Slurm and production."""

    other_names: ClassVar[dict[str, str]] = OTHER_NAMES

    scheduler: Annotated[Literal["local", "slurm"], Field(description="local: this machine, without Slurm")] = "slurm"
    name: Annotated[str, Field(description="name of the cluster; by default the file's"), NAMED] = "local"
    python: Annotated[
        str,
        Field(
            default_factory=lambda: sys.executable,
            description="absolute interpreter of the stages; by default the one that submits, in an image its own",
            examples=["/shared/env/bin/python"],
        ),
        LINE,
        ABSOLUTE,
    ]
    host_python: Annotated[
        str,
        Field(
            default_factory=lambda: sys.executable,
            description="absolute interpreter for the job scripts' own questions, outside a container",
            examples=["/shared/env/bin/python"],
        ),
        LINE,
        ABSOLUTE,
    ]
    cores: Annotated[
        int, Field(ge=0, le=100_000, description="CPUs of one node, for planning; 0: not known", examples=[128]), WHOLE
    ] = 0
    sbatch: Annotated[
        SbatchOptions,
        Field(
            description="options of sbatch for every Job: Slurm's names without dashes, values as text",
            examples=["{partition: gpu, account: my-group}"],
        ),
    ] = {}
    srun: Annotated[
        SrunOptions, Field(description="options of srun for every step", examples=["{cpu-bind: cores}"])
    ] = {}
    stages: Annotated[Stages, Field(description="options for single stages, over those above")] = Stages()
    gpus_per_node: Annotated[
        int | None,
        Field(ge=1, le=1024, description="GPUs of one node; null: none", examples=[8]),
        WHOLE,
        GPUS,
    ] = None
    gpu_type: Annotated[
        str | None,
        Field(description="type of GPU in Slurm's GRES, where there are several", examples=["h100"]),
        GPU_TYPE,
        AsTyped(),
    ] = None
    gpu_flag: Annotated[
        Literal["gres", "gpus-per-node", "none"],
        Field(description="option by which GPUs are asked for; none: not at all, where whole nodes are given"),
    ] = "gres"
    cpus_per_task: Annotated[
        int | None, Field(ge=1, le=100_000, description="CPUs of one task; null: Slurm's default", examples=[16]), WHOLE
    ] = None
    mem: Annotated[
        str | None,
        Field(description="memory of a node with its unit K, M, G, T; 0: all; null: Slurm's default", examples=["64G"]),
        MEMORY,
        AsTyped(),
    ] = None
    env: Annotated[
        Environment,
        Field(
            description="environment variables of every rank, as text; they win over those of `network`",
            examples=["{NCCL_IB_HCA: =mlx5_0}"],
        ),
    ] = {}
    secret_env: Annotated[
        list[Annotated[str, SECRET_NAME]],
        Field(
            description="names of variables that ranks get from secret_file, or from the environment that submits",
            examples=["[HF_TOKEN]"],
        ),
    ] = []
    secret_file: Annotated[
        str | None,
        Field(description="file of NAME=value lines that only its owner may read; null: none", examples=["~/.tokens"]),
        LINE,
        ABSOLUTE,
    ] = None
    network: Annotated[
        Network | None, Field(description="profile of variables for NCCL, UCX and libfabric; null: they choose")
    ] = None
    nccl_debug: Annotated[NcclDebug, Field(description="NCCL_DEBUG; INFO also says which network was taken")] = "WARN"
    launcher: Annotated[
        Literal["torchrun", "srun"],
        Field(description="torchrun: one per node starts ranks; srun: each rank a task"),
    ] = "torchrun"
    signal_lead: Annotated[
        int,
        Field(ge=60, le=65_535, description="seconds before its time limit at which a Job is warned"),
        WHOLE,
    ] = 120
    max_restarts_without_progress: Annotated[
        int,
        Field(ge=1, le=1000, description="how often in a row one cause, without a new step, stops the chain"),
        WHOLE,
    ] = 2
    node_mtbf_days: Annotated[
        float,
        Field(gt=0, le=1e6, description="days after which one node fails, on average; for the Plan's estimate"),
        REAL,
    ] = 150.0
    bad_node_hours: Annotated[
        float, Field(ge=0, le=10_000, description="hours for which a node that failed is left out"), REAL
    ] = 24.0
    state_dir: Annotated[
        str | None,
        Field(
            description="shared folder of the list of bad nodes; null: a folder beside the Runs",
            examples=["/shared/pipeline-state"],
        ),
        LINE,
        ABSOLUTE,
    ] = None
    image: Annotated[
        str | None,
        Field(
            description="container image that stages run in (Pyxis): a .sqsh file or a registry's; null: none",
            examples=["/shared/images/train.sqsh"],
        ),
        LINE,
    ] = None
    image_cache: Annotated[
        str | None,
        Field(
            description="folder on each node's own disk that the image is copied to, once; null: read where it is",
            examples=["/local/scratch"],
        ),
        LINE,
        ABSOLUTE,
    ] = None
    mounts: Annotated[
        list[Annotated[str, MOUNT]],
        Field(
            description="further folders for the container, read-only unless :rw follows",
            examples=["[/scratch:/scratch:rw]"],
        ),
    ] = []
    cluster: Annotated[
        str | None,
        Field(
            description="Slurm's name of the cluster, where one login node serves several (--clusters); null: its own",
            examples=["gpu2"],
        ),
        CLUSTER,
    ] = None
    kill_on_invalid_dep: Annotated[
        bool,
        Field(description="whether Slurm cancels a Job that waits for one that failed; false where a site forbids it"),
    ] = True
    job_mark: Annotated[
        Mark,
        Field(description="where a Job shows that it is a Run's; name: where the site writes comments of its own"),
    ] = "comment"
    nodes_may_submit: Annotated[bool, Field(description="whether sbatch and scontrol may be called on nodes")] = True
    confirm_gpu_hours: Annotated[
        float | None, Field(ge=0, le=1e9, description="GPU-hours of a Run from which on submit asks; null: never"), REAL
    ] = None
    max_gpu_hours: Annotated[
        float | None, Field(gt=0, le=1e9, description="GPU-hours of a Run at which the chain stops; null: never"), REAL
    ] = None
    login: Annotated[Login | None, Field(description="how to reach Slurm from elsewhere; null: it is here")] = None

    def environment(self) -> dict[str, str]:
        """Return the variables that every rank must have: profile, nccl_debug, env."""
        return environment(self.network, self.nccl_debug, self.env)

    def slurm(self) -> Slurm:
        """Return Slurm's commands as they are reached from here."""
        there = Slurm(tuple(self.login.prefix), self.login.quoting) if self.login else Slurm()
        return replace(there, cluster=self.cluster, mark=self.job_mark)

    def slurm_on_nodes(self) -> Slurm:
        """Return Slurm's commands as a node of the cluster calls them, whatever the way in from elsewhere is."""
        return Slurm(cluster=self.cluster, mark=self.job_mark)

    def gpu_option(self, gpus: int) -> dict[str, str]:
        """Return the one option that asks for `gpus` GPUs on each node, or none."""
        if not gpus or self.gpu_flag == "none":
            return {}
        kind = [self.gpu_type] if self.gpu_type else []
        return {self.gpu_flag: ":".join([*(["gpu"] if self.gpu_flag == "gres" else []), *kind, str(gpus)])}

    def sbatch_options(self, stage: str, section: StageSection | None = None, gpus: int = 0) -> dict[str, str]:
        """Merge the options of cluster, stage and config with those for memory, CPUs and `gpus` GPUs per node.

        UserError where the config asks for GPUs by an option of Slurm's beside gpus_per_node.
        """
        given = self.sbatch | self._overlay(stage).sbatch | (section.sbatch if section else {})
        second = next((option for option in GPU_OPTIONS if option in given), None)
        if self.gpus_per_node is not None and second:
            raise UserError(_second_gpu_option(f"{stage}.sbatch.{second}", second))
        resources = self.gpu_option(gpus)
        if self.cpus_per_task is not None:
            resources["cpus-per-task"] = str(self.cpus_per_task)
        if self.mem is not None and not any(option in given for option in MEMORY_OPTIONS):
            resources["mem"] = self.mem
        return resources | given

    def srun_options(self, stage: str, section: StageSection | None = None) -> dict[str, str]:
        """Merge srun's options of cluster, stage and config."""
        return self.srun | self._overlay(stage).srun | (section.srun if section else {})

    def _overlay(self, stage: str) -> Options:
        found = getattr(self.stages, stage, None)
        return found if isinstance(found, Options) else Options()


def _second_gpu_option(where: str, option: str) -> str:
    return (
        f"{where}: two options would ask for GPUs, {option} and the one of gpus_per_node, and Slurm refuses that; "
        f"remove {option}, or remove gpus_per_node from the cluster file"
    )


# Rules between keys


def _gpu_options(cluster: Cluster) -> str | None:
    if cluster.gpus_per_node is None:
        return None
    maps = {"sbatch": cluster.sbatch} | {
        f"stages.{stage}.sbatch": getattr(cluster.stages, stage).sbatch for stage in Stages.model_fields
    }
    found = [(where, option) for where, options in maps.items() for option in GPU_OPTIONS if option in options]
    return _second_gpu_option(f"{found[0][0]}.{found[0][1]}", found[0][1]) if found else None


def _type_without_gpus(cluster: Cluster) -> str | None:
    if cluster.gpu_type is None or cluster.gpus_per_node is not None:
        return None
    return "gpu_type says which GPUs, and nothing says how many; add gpus_per_node"


def _no_slurm(cluster: Cluster) -> str | None:
    if cluster.scheduler == "slurm" or not (cluster.sbatch or cluster.srun or cluster.login or cluster.cluster):
        return None
    return (
        "scheduler: local runs without Slurm, and sbatch, srun, cluster and login need it; remove them or write slurm"
    )


def _hours(cluster: Cluster) -> str | None:
    confirm, most = cluster.confirm_gpu_hours, cluster.max_gpu_hours
    if confirm is None or most is None or confirm <= most:
        return None
    return f"confirm_gpu_hours {confirm:g} is more than max_gpu_hours {most:g}, so nothing is ever asked; lower it"


RULES: list[Rule[Cluster]] = [
    Rule(("gpus_per_node", "sbatch", "stages"), _gpu_options),
    Rule(("gpu_type", "gpus_per_node"), _type_without_gpus),
    Rule(("scheduler", "sbatch", "srun", "cluster", "login"), _no_slurm),
    Rule(("confirm_gpu_hours", "max_gpu_hours"), _hours),
]
