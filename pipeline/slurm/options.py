"""Slurm's own options in the maps `sbatch:` and `srun:`, passed on as text; those that the plan owns are refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated

from pydantic import BeforeValidator

from pipeline.config.types import AsTyped, broken_rule, has_control_characters

OPTION = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
FLAG = "true"  # the value of an option that takes none

SHORT = {
    "A": "account", "b": "begin", "C": "constraint", "c": "cpus-per-task", "G": "gpus", "J": "job-name",
    "L": "licenses", "N": "nodes", "n": "ntasks", "p": "partition", "q": "qos", "t": "time", "w": "nodelist",
    "x": "exclude", "d": "dependency", "D": "chdir", "e": "error", "o": "output", "a": "array", "M": "clusters",
    "H": "hold", "s": "oversubscribe", "k": "no-kill", "F": "nodefile", "m": "distribution", "O": "overcommit",
}  # fmt: skip

# Of Slurm 22.05 to 25.05; only to tell abbreviations and underscores, others are passed on as they are.
SBATCH = frozenset(
    "account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment constraint contiguous "
    "core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency distribution "
    "error exclude exclusive export export-file extra extra-node-info get-user-env gid gpu-bind gpu-freq gpus "
    "gpus-per-node gpus-per-socket gpus-per-task gres gres-flags help hint hold ignore-pbs input job-name "
    "kill-on-invalid-dep licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus "
    "network nice no-kill no-requeue nodefile nodelist nodes ntasks ntasks-per-core ntasks-per-gpu "
    "ntasks-per-node ntasks-per-socket oom-kill-step open-mode output overcommit oversubscribe parsable partition "
    "power prefer priority profile propagate qos quiet reboot requeue reservation resv-ports segment signal "
    "sockets-per-node spread-job stepmgr switches test-only thread-spec threads-per-core time time-min tmp "
    "tres-bind tres-per-job tres-per-task uid usage use-min-nodes verbose version wait wait-all-nodes wckey wrap "
    "x11".split()
)
SRUN = SBATCH | frozenset(
    "accel-bind bcast bcast-exclude compress cpu-bind disable-status epilog exact external het-group immediate "
    "jobid kill-on-bad-exit label max-threads mpi msg-timeout multi-prog no-allocate overlap preserve-env prolog "
    "pty relative send-libs slurmd-debug task-epilog task-prolog treewidth unbuffered whole".split()
)

_PLAN = "is set by the plan; remove the line"
_PRINTS = "prints something and submits nothing; remove the line"
_BOTH = {
    "nodes": "is set by the plan; write nodes below pretrain",
    "ntasks": "is set by the plan; write nodes and nproc_per_node below pretrain",
    "ntasks-per-node": "is set by the plan; write nproc_per_node below pretrain, and launcher in the cluster file",
    "time": "is set by the plan; write time below the stage",
    "job-name": "is set by the plan; write name at the top of the config",
    "output": "is set by the plan: logs lie in the Run; write runs_dir at the top of the config",
    "error": "is set by the plan: logs lie in the Run; write runs_dir at the top of the config",
    "export": "is set by the plan; write variables below env in the cluster file",
    "chdir": "is set by the plan: every path in a Run is absolute; remove the line",
    "dependency": "is set by the plan, which orders the Jobs; remove the line",
    "comment": "is set by the plan: it holds the token by which a Job is found again; remove the line",
    "signal": "is set by the plan; write signal_lead in the cluster file",
    "wait": "is set by the plan, which waits for no Job; to look, use the verb status",
    "test-only": "submits nothing; use the word --test of the verb submit",
    "cluster-constraint": "chooses another Slurm than is asked afterwards; write one cluster file for each",
    "clusters": "chooses another Slurm than is asked afterwards; write cluster at the top of the cluster file",
    "help": _PRINTS,
    "usage": _PRINTS,
    "version": _PRINTS,
}
SBATCH_OWNED = _BOTH | {
    "kill-on-invalid-dep": "is set by the plan; write kill_on_invalid_dep in the cluster file",
    "parsable": _PLAN,
    "export-file": "would leave PATH out; write variables below env in the cluster file",
    "array": "is set by the plan, which cuts the work; remove the line",
    "open-mode": "is set by the plan: no log is ever truncated; remove the line",
    "requeue": "is set by the plan; remove the line",
    "no-requeue": "is set by the plan; remove the line",
    "time-min": "is set by the plan; write time below the stage, and time_min below pretrain, which can use it",
    "wrap": "would run another script than the stage's; remove the line",
}
SRUN_OWNED = _BOTH | {
    "array": _PLAN,
    "cpus-per-task": "is set by the plan; write cpus_per_task in the cluster file",
    "jobid": _PLAN,
    "kill-on-bad-exit": _PLAN,
    "multi-prog": "would run another program than the stage's; remove the line",
    "no-allocate": "would leave the allocation; remove the line",
    "pty": "needs a terminal, which a Job has not; remove the line",
}
_CONTAINER = {
    "sbatch": "would put the job script itself into the container, where there is no srun; remove the line",
    "srun": "is set by the plan from the image that the stage runs in; remove the line",
}


def _name_problem(name: str, command: str) -> str | None:
    """Say why an option cannot be given, or return None."""
    owned, known = (SBATCH_OWNED, SBATCH) if command == "sbatch" else (SRUN_OWNED, SRUN)
    if name.startswith("-"):
        bare = name.lstrip("-").partition("=")[0]
        return f"is written with dashes; write {SHORT.get(bare, bare)}"
    if name in SHORT:
        return f"is a short option; write {SHORT[name]}"
    if not OPTION.fullmatch(name):
        return "is not the name of an option; write for example partition: gpu"
    dashed = name.lower().replace("_", "-")
    if name != dashed and dashed in known:
        return f"is not an option of {command}; did you mean {dashed}?"
    if dashed.startswith("container"):
        return _CONTAINER[command]
    if dashed in owned:
        return owned[dashed]
    # Slurm takes any unambiguous beginning of an option for the whole.
    if dashed not in known and (whole := next((option for option in owned if option.startswith(dashed)), None)):
        return f"is short for {whole}, which {owned[whole]}"
    return None


def _name_rule(command: str) -> Callable[[object], object]:
    def rule(value: object) -> object:
        problem = _name_problem(value, command) if isinstance(value, str) else None
        if problem is not None:
            raise broken_rule(problem)
        return value

    return rule


def _value_rule(value: object) -> object:
    if value is True:
        return FLAG
    if value is None:
        raise broken_rule("has no value; write one, or true for an option that takes none")
    if not isinstance(value, str):
        return value
    if value.lower() == "false":
        raise broken_rule("is no value of an option; remove the line, or write true for an option that takes no value")
    if value.lower() == FLAG:
        return FLAG
    if not value.strip():
        raise broken_rule("is empty; write a value, or true for an option that takes none")
    if has_control_characters(value):
        raise broken_rule("holds control characters or broken UTF-8; remove them")
    return value


_VALUE = Annotated[str, BeforeValidator(_value_rule)]
SbatchOptions = Annotated[dict[Annotated[str, BeforeValidator(_name_rule("sbatch"))], _VALUE], AsTyped()]
SrunOptions = Annotated[dict[Annotated[str, BeforeValidator(_name_rule("srun"))], _VALUE], AsTyped()]


def option_words(options: Mapping[str, str]) -> list[str]:
    """Write options as words of a command line: `--exclusive`, `--gres=gpu:h100:8`."""
    return [f"--{name}" if value == FLAG else f"--{name}={value}" for name, value in options.items()]
