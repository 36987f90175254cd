"""A shell on a node of the cluster, with what the ranks of a Run find there."""

from __future__ import annotations

import os
import sys

from pipeline.config.schema import Config
from pipeline.errors import UserError
from pipeline.hints import command
from pipeline.plan.flags import gpus_of
from pipeline.run.folder import Run
from pipeline.slurm.environment import clean_environment
from pipeline.slurm.options import option_words
from pipeline.submit.run_folder import read_cluster


def shell_command(run: Run, config: Config, time: str, nodes: int = 1) -> list[str]:
    """Return the srun line that opens a shell as pretrain's Jobs are started: same options, GPUs and memory."""
    cluster = read_cluster(run)
    gpus = gpus_of("pretrain", config, cluster)
    section = config.pretrain
    options = cluster.sbatch_options("pretrain", section, gpus) | cluster.srun_options("pretrain", section)
    words = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", f"--time={time}", "--pty", *option_words(options)]
    return [*words, "bash", "-i"]


def open_shell(run: Run, config: Config, time: str) -> None:
    """Become that srun. Does not return."""
    if not run.cluster.is_file():
        raise UserError(f"{run.name} runs on this machine, so any shell will do; plan it for a cluster: --cluster FILE")
    words = shell_command(run, config, time)
    environment = clean_environment() | read_cluster(run).environment()
    environment |= {"PYTHONPATH": str(run.snapshot), "PIPELINE_RUN": str(run.root)}
    print(f"on the node: {command('status', run.root)}", file=sys.stderr)
    try:
        os.execvpe(words[0], words, environment)
    except FileNotFoundError:
        raise UserError(f"{words[0]}: no such command here; a shell needs Slurm's commands") from None
