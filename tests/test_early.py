"""What a stage's process does before anything else."""

from __future__ import annotations

import subprocess
import sys

from conftest import PROJECT, environment


def test_a_stage_leaves_no_core_file_which_would_hold_its_secrets() -> None:
    """Slurm's daemons raise the limit for themselves, and where limits are not passed on theirs is what a rank has."""
    code = (
        "import sys, types; sys.modules['__main__'].__spec__ = types.SimpleNamespace(name='pipeline.stages.pretrain');"
        "import pipeline.stages.early, resource; print(*resource.getrlimit(resource.RLIMIT_CORE))"
    )
    words = ["bash", "-c", 'ulimit -S -c 64; ulimit -H -c 64; exec "$@"', "bash", sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, cwd=PROJECT, env=environment(), check=True)
    assert done.stdout.split() == ["0", str(64 * 1024)]


def test_nor_does_its_launcher() -> None:
    names = {"SLURM_NNODES": "1", "SLURM_NODEID": "0", "MASTER_ADDR": "n1", "MASTER_PORT": "1"}
    script = 'ulimit -S -c 64; ulimit -H -c 64; exec bash sbatch/node.sh bash -c "ulimit -S -c" -- x'
    words = ["bash", "-c", script]
    done = subprocess.run(words, capture_output=True, text=True, cwd=PROJECT, env=environment(**names), check=True)
    assert done.stdout == "0\n"
