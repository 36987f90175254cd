"""What will be run, as pure data: Jobs, their order, their command lines, their launch files."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from typing import Any

from pipeline import sizes
from pipeline.cluster import Cluster
from pipeline.config import Config
from pipeline.errors import UserError
from pipeline.run import Run

STAGES = ("tokenize", "pretrain", "evaluate", "inference")

# A stop signal that reaches torchrun goes on to the ranks, which save and end by themselves; by default it knows no
# USR2, dies of it and leaves them behind. Ranks that hang are not waited for: their watchdogs end them.
TORCHRUN_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR2"
SAVE_SECONDS = 600

# What a parent job or torchrun may have left in the environment; a local run must not take it for its own.
FOREIGN_VARIABLES = (
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK NODE_RANK MASTER_ADDR MASTER_PORT "
    "TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS PYTHONHOME"
).split()


@dataclass(frozen=True)
class Job:
    """One submission of a Stage."""

    stage: str
    job_id: str
    segment: int
    after: list[str]  # job ids that must have completed
    command: list[str]
    time: str
    ranks: int


@dataclass(frozen=True)
class Plan:
    """All Jobs of a Run, the files that they source, and what was derived on the way."""

    run: str
    scheduler: str
    jobs: list[Job]
    files: dict[str, str]  # path inside the Run -> text
    derived: dict[str, str]  # what -> value with its arithmetic

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def make_plan(config: Config, cluster: Cluster, run: Run) -> Plan:
    """Compute the Plan of a whole chain. Nothing is read, written or run."""
    ranks = {stage: config.pretrain.nproc_per_node if stage == "pretrain" else 1 for stage in STAGES}
    if max(ranks.values()) > cluster.cores:
        raise UserError(
            f"pretrain.nproc_per_node: {ranks['pretrain']} ranks, but this machine has {cluster.cores} cores; "
            f"write {cluster.cores} or fewer"
        )
    jobs = [
        Job(
            stage=stage,
            job_id=str(number),
            segment=0,
            after=[str(number - 1)] if number > 1 else [],
            command=["bash", str(run.snapshot / "sbatch" / f"{stage}.sbatch"), str(run.root)],
            time=getattr(config, stage).time,
            ranks=ranks[stage],
        )
        for number, stage in enumerate(STAGES, start=1)
    ]
    files = {str(run.launch(job.stage).relative_to(run.root)): _launch_file(job, cluster, run) for job in jobs}
    return Plan(str(run.root), cluster.scheduler, jobs, files, derive(config, cluster))


def _launch_file(job: Job, cluster: Cluster, run: Run) -> str:
    """Write the bash that a job script sources: assignments, one array, exports."""
    python = [cluster.python, "-u"]
    if job.ranks > 1:
        torchrun = f"-m torch.distributed.run --standalone --nproc-per-node={job.ranks} --max-restarts=0 --no-python"
        torchrun += f" --signals-to-handle={TORCHRUN_SIGNALS} --shutdown-timeout={SAVE_SECONDS}"
        python = [cluster.python, *torchrun.split(), *python]
    lines = [
        f"# Written by plan, sourced by sbatch/{job.stage}.sbatch.",
        f"SCHEDULER={cluster.scheduler}",
        f"PYTHON={shlex.quote(cluster.python)}",
        f"LAUNCH=({shlex.join(python)})",
        f"unset {' '.join(FOREIGN_VARIABLES)}",
        f"export PYTHONPATH={shlex.quote(str(run.snapshot))}",
        "export PYTHONUTF8=1",
        "export PYTHONDONTWRITEBYTECODE=1",
    ]
    if job.ranks > 1:
        lines.append("export GLOO_SOCKET_IFNAME=lo")  # one machine: whatever its name resolves to
    if job.stage == "pretrain":
        lines.append(f"export TORCHINDUCTOR_CACHE_DIR={shlex.quote(str(run.root / 'cache' / 'inductor'))}")
    if job.stage != "tokenize":
        lines.append("export HF_HUB_OFFLINE=1")  # only tokenize may download
    return "\n".join(lines) + "\n"


def derive(config: Config, cluster: Cluster) -> dict[str, str]:
    """List the values that follow from the Config, each with its arithmetic."""
    model, pretrain, vocab_size = config.model, config.pretrain, config.tokenize.vocab_size
    total = sizes.num_parameters(model, vocab_size)
    flops = sizes.flops_per_token(model, vocab_size, pretrain.sequence_length)
    tokens = sizes.tokens_per_step(config)
    head = "tied head" if model.tie_word_embeddings else "head of its own"
    threads = config.threads or max(1, cluster.cores // pretrain.nproc_per_node)
    return {
        "parameters": f"{total:,} = {sizes.layer_parameters(model):,} in {model.num_hidden_layers} layers + "
        f"embedding of {vocab_size:,} x {model.hidden_size} ({head}) + norms",
        "FLOPs per token": f"{flops:.3g} = 6 N + 12 L D T",
        "tokens per step": f"{tokens:,} = {pretrain.global_batch_size} sequences x {pretrain.sequence_length}",
        "tokens in all": f"{tokens * pretrain.max_steps:,} = {pretrain.max_steps:,} steps x {tokens:,}",
        "FLOPs in all": f"{flops * tokens * pretrain.max_steps:.3g}",
        "checkpoint": f"{sizes.checkpoint_bytes(config) / 1e6:,.1f} MB: fp32 weights and optimizer state",
        "CPU threads": f"{threads} per rank = {cluster.cores} cores / {pretrain.nproc_per_node} ranks"
        if config.threads is None
        else f"{threads} per rank, as the key threads says",
    }
