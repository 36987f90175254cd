"""A shell on a node of the cluster, with what the ranks of a Run find there."""

from __future__ import annotations

import os
import sys

from pipeline.config.schema import Config
from pipeline.errors import UserError
from pipeline.hints import command
from pipeline.run.folder import Run
from pipeline.submit.own_step import own_environment, own_step, require_srun, with_launch_file
from pipeline.submit.run_folder import read_cluster
from pipeline.visible import visible


def shell_command(run: Run, config: Config, time: str) -> list[str]:
    """Return the words that open a shell as pretrain's Jobs are started: options, GPUs, memory, variables and image."""
    own = [f"--time={time}", "--pty"]
    words = own_step("pretrain", run, config, read_cluster(run), own, ["bash", "-i"])
    return with_launch_file("pretrain", run, run.snapshot, words)


def open_shell(run: Run, config: Config, time: str) -> None:
    """Become that srun. Does not return."""
    if not run.cluster.is_file():
        raise UserError(f"{run.name} runs on this machine, so any shell will do; plan it for a cluster: --cluster FILE")
    words = shell_command(run, config, time)
    require_srun()
    print(visible(f"on the node: {command('status', run.root)}"), file=sys.stderr, flush=True)
    os.execvpe(words[0], words, own_environment(read_cluster(run)) | {"PIPELINE_RUN": str(run.root)})
