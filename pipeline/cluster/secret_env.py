"""Secrets by name: their values come from a file that only its owner may read, or from the environment that submits.

They reach the ranks by the environment alone: no plan, script, log, option or image ever holds one. Those of the file
are in no Job's environment either: the process that becomes srun reads them (secret_file.py). What only the environment
has, Slurm carries along with the Job.
"""

from __future__ import annotations

import os
from pathlib import Path

from pipeline.cluster.schema import Cluster
from pipeline.cluster.secret_file import read_secrets
from pipeline.errors import UserError

KNOWN = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY")  # that libraries of the stages look for


def check_secrets(cluster: Cluster) -> None:
    """Refuse a file of secrets that cannot be read as one, or that others may read, and a name without a value."""
    given = read_secrets(Path(cluster.secret_file)) if cluster.secret_file else {}
    missing = [name for name in cluster.secret_env if not given.get(name) and not os.environ.get(name)]
    if missing:
        place = f"{cluster.secret_file}, or " if cluster.secret_file else "secret_file, or "
        raise UserError(
            f"secret_env: {', '.join(missing)} has no value; write NAME=value into {place}export it before you submit"
        )


def carried_names(cluster: Cluster) -> list[str]:
    """Return the names whose values only the environment has; a Job gets them with its submission, or not at all."""
    try:
        given = read_secrets(Path(cluster.secret_file)) if cluster.secret_file else {}
    except UserError:  # the step that needs it says so
        given = {}
    return [name for name in cluster.secret_env if name in os.environ and name not in given]


def left_behind(cluster: Cluster) -> str:
    """Say which well-known secrets of this shell the Jobs will not have; empty where there are none."""
    named = {*cluster.secret_env, *(read_secrets(Path(cluster.secret_file)) if cluster.secret_file else ())}
    names = ", ".join(name for name in KNOWN if os.environ.get(name) and name not in named)
    return f"{names}: set here, and no Job gets it; where one needs it, name it in secret_env" if names else ""
