"""Run one of the package's programs beside the chain, with the interpreter or in the image that stages run in."""

from __future__ import annotations

import os
import subprocess
import sys

from pipeline.cluster.load import open_cluster
from pipeline.cluster.schema import Cluster
from pipeline.config.schema import Config
from pipeline.errors import EXIT_INTERRUPTED, NotReadyError, UserError
from pipeline.hints import command
from pipeline.plan.flags import gpus_of
from pipeline.plan.launch import FOREIGN_VARIABLES
from pipeline.run.folder import Run
from pipeline.slurm.environment import clean_environment
from pipeline.slurm.options import option_words
from pipeline.submit.run_folder import PROJECT, read_cluster

# $1 is the launch file of a stage, $2 the code; then the number of options for the launch word, these, and the program.
LAUNCH = """
set -euo pipefail
source "$1"
export PYTHONPATH=$2
options=("${@:4:$3}")
exec "${LAUNCH[0]}" "${options[@]}" "${LAUNCH[@]:1}" "${@:4+$3}"
"""


def run_aside(run: Run, config: Config, program: str, words: list[str], given: str = "") -> int:
    """Run `python -m pipeline.stages.PROGRAM WORDS` as inference's Jobs are run; return its exit code.

    On a cluster that is an allocation of its own, with inference's time limit and options. `given` is its standard
    input; what it prints goes where this process's own words go.
    """
    cluster = read_cluster(run) if run.cluster.is_file() else open_cluster("local", sys.executable)
    code, options = PROJECT, []
    if cluster.scheduler == "slurm":
        code, options = run.snapshot, _options(config, cluster)
    if not (code / "pipeline" / "stages" / f"{program}.py").is_file():
        raise UserError(
            f"{run.snapshot}: the Run's code is of an older version, which has no {program}. "
            f"Give it today's, with a few more steps: {command('resume', run.root, 'pretrain.max_steps=...')}"
        )
    script = ["bash", "-c", LAUNCH, "bash", str(run.launch("inference")), str(code), str(len(options)), *options]
    environment = clean_environment()
    environment = {name: value for name, value in environment.items() if name not in FOREIGN_VARIABLES}
    sys.stdout.flush()
    process = subprocess.Popen(
        [*script, "-m", f"pipeline.stages.{program}", *words], stdin=subprocess.PIPE, env=environment, cwd=os.getcwd()
    )
    try:
        process.communicate(given.encode())
    except KeyboardInterrupt:  # the terminal has sent it to that process too
        process.wait()
        return EXIT_INTERRUPTED
    if process.returncode == 127:
        raise NotReadyError("a word of the launch line was not found, see above; on a cluster it is srun")
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _options(config: Config, cluster: Cluster) -> list[str]:
    """Return what the launch line of a Job leaves to sbatch."""
    section = config.inference
    words = option_words(cluster.sbatch_options("inference", section, gpus_of("inference", config, cluster)))
    return ["--quiet", "--unbuffered", f"--time={section.time}", *words]
