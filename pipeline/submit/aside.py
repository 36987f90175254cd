"""Run one of the package's programs beside the chain, with the interpreter or in the image that stages run in."""

from __future__ import annotations

import os
import subprocess
import sys

from pipeline.cluster.load import open_cluster
from pipeline.config.schema import Config
from pipeline.errors import EXIT_INTERRUPTED, NotReadyError, UserError
from pipeline.hints import command
from pipeline.run.folder import Run
from pipeline.submit.own_step import BY_LAUNCH, own_environment, own_step, require_srun, with_launch_file
from pipeline.submit.run_folder import PROJECT, read_cluster


def run_aside(run: Run, config: Config, program: str, words: list[str], given: str = "") -> int:
    """Run `python -m pipeline.stages.PROGRAM WORDS` as inference's Jobs are run; return its exit code.

    On a cluster that is an allocation of its own, with inference's time limit and options. `given` is its standard
    input; what it prints goes where this process's own words go.
    """
    cluster = read_cluster(run) if run.cluster.is_file() else open_cluster("local", sys.executable)
    code = run.snapshot if cluster.scheduler == "slurm" else PROJECT
    if not (code / "pipeline" / "stages" / f"{program}.py").is_file():
        raise UserError(
            f"{run.snapshot}: the Run's code is of an older version, which has no {program}. "
            f"Give it today's, with a few more steps: {command('resume', run.root, 'pretrain.max_steps=...')}"
        )
    words = ["-m", f"pipeline.stages.{program}", *words]
    if cluster.scheduler == "slurm":
        require_srun()
        own = ["--quiet", "--unbuffered", "--kill-on-bad-exit=1", f"--time={config.inference.time}"]
        line = own_step("inference", run, config, cluster, own, [cluster.python, "-u", *words])
        script = with_launch_file("inference", run, code, line)
    else:
        script = with_launch_file("inference", run, code, words, BY_LAUNCH)
    sys.stdout.flush()
    process = subprocess.Popen(script, stdin=subprocess.PIPE, env=own_environment(cluster), cwd=os.getcwd())
    try:
        process.communicate(given.encode())
    except KeyboardInterrupt:  # the terminal has sent it to that process too
        process.wait()
        return EXIT_INTERRUPTED
    if process.returncode == 127:
        raise NotReadyError("a word of the launch line was not found, see above")
    return process.returncode if process.returncode >= 0 else 128 - process.returncode
