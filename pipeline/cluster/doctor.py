"""What can be checked about a cluster from where Jobs are submitted, before any is."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeline.cluster.doctor_paths import Check, look_at_paths
from pipeline.cluster.limits import look_at_account, look_at_partitions, options_of, partition_names
from pipeline.cluster.schema import Cluster
from pipeline.cluster.secret_env import check_secrets
from pipeline.config.schema import Config
from pipeline.errors import EXIT_DONE, EXIT_NOT_READY, UserError
from pipeline.plan.flags import gpus_of
from pipeline.plan.jobs import STAGES
from pipeline.slurm.commands import Partition, Slurm
from pipeline.slurm.errors import SlurmError
from pipeline.slurm.gres import gpus_in
from pipeline.slurm.options import option_words
from pipeline.slurm.time_limits import time_seconds

OLDEST = (20, 11)  # the first whose squeue has --me
STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@dataclass(frozen=True)
class Patient:
    """What is examined. Without a config only the cluster itself is."""

    cluster: Cluster
    config: Config | None
    slurm: Slurm
    partitions: list[Partition]
    settings: dict[str, str]

    def partition_of(self, stage: str) -> list[str]:
        """Return the names of the partitions that a stage's Job may run in."""
        return partition_names(self.options_of(stage), self.partitions)

    def options_of(self, stage: str) -> dict[str, str]:
        """Return the options of a stage's Job, its GPUs aside."""
        return options_of(self.cluster, self.config, stage)


def examine(cluster: Cluster, config: Config | None) -> list[Check]:
    """Look at everything that can be seen from here; no failure of a command is more than a line of the result."""
    slurm = cluster.slurm()
    checks = [*_commands(slurm)]
    if not any(check.state == "fail" for check in checks):
        try:
            settings, partitions = slurm.config(), slurm.partitions()
        except SlurmError as error:
            checks.append(_failed("controller", error))
        else:
            name, version = settings.get("ClusterName", "?"), settings.get("SLURM_VERSION", "?")
            checks.append(Check("controller", "ok", f"{name}, Slurm {version}"))
            patient = Patient(cluster, config, slurm, partitions, settings)
            for look in (_partitions, _gpus, _account, _request, _array, _warning, _container):
                checks += _safely(look, patient)
    return [*checks, *look_at_paths(cluster, config, slurm), *_secrets(cluster)]


def _secrets(cluster: Cluster) -> Iterator[Check]:
    """Read the secrets as `submit` does; a file on another machine is read there."""
    if cluster.login or not (cluster.secret_file or cluster.secret_env):
        return
    try:
        check_secrets(cluster)
    except UserError as error:
        said, _, remedy = str(error).partition("; ")
        yield Check("secrets", "fail", said, remedy or "mend secret_file in the cluster file, or the file")
    else:
        yield Check("secrets", "ok", ", ".join(cluster.secret_env) or str(cluster.secret_file))


def _failed(name: str, error: UserError) -> Check:
    text, _, remedy = str(error).partition("\nWhat to do: ")
    said = error.answer if isinstance(error, SlurmError) else text
    return Check(name, "fail", " ".join(said.split()), remedy or "ask an administrator, with this text")


def _safely(look: Callable[[Patient], Iterator[Check]], patient: Patient) -> list[Check]:
    try:
        return list(look(patient))
    except UserError as error:
        return [_failed(look.__name__.strip("_"), error)]


def _commands(slurm: Slurm) -> Iterator[Check]:
    """Look for Slurm's commands; without the first there is no use in asking for more."""
    versions = []
    for name in ("sbatch", "squeue", "scontrol", "scancel", "sinfo", "srun"):
        try:
            versions.append(slurm.version(name))
        except SlurmError as error:
            yield _failed(name, error)
            return
    found = sorted(set(versions))
    number = re.search(r"([0-9]+)\.([0-9]+)", found[0])
    if len(found) > 1:
        yield Check("commands", "warn", ", ".join(found), "these are of different versions; load one module of Slurm")
    elif number and (int(number[1]), int(number[2])) < OLDEST:
        yield Check("commands", "fail", found[0], "Slurm 20.11 or newer is needed")
    else:
        yield Check("commands", "ok", found[0])


def _partitions(patient: Patient) -> Iterator[Check]:
    """Compare each stage's partition with what its Job will ask for."""
    for stage in STAGES:
        for found in look_at_partitions(patient.cluster, patient.config, patient.partitions, stage):
            yield Check(f"partition of {stage}", found.state, found.found, found.remedy)


def _gpus(patient: Patient) -> Iterator[Check]:
    """Compare gpus_per_node and gpu_type with the GRES that Slurm has registered."""
    cluster, names = patient.cluster, patient.partition_of("pretrain")
    if cluster.gpus_per_node is None:
        return
    gres = sorted({partition.gres or "none" for partition in patient.partitions if partition.name in names})
    gpus = [gpu for text in gres for gpu in gpus_in(text)]
    fitting = [gpu.number for gpu in gpus if cluster.gpu_type in (None, gpu.kind)]
    found = f"{cluster.gpus_per_node} {cluster.gpu_type or ''}".strip() + f" asked for, {', '.join(gres)} registered"
    if cluster.gpu_flag == "none":
        yield Check("GPUs", "ok", f"{found}; no option asks for them")
    elif not fitting:
        kinds = ", ".join(sorted({gpu.kind for gpu in gpus if gpu.kind})) or "none"
        advice = f"the types in this partition: {kinds}; mend gpu_type, or gpu_flag: none where no option is wanted"
        yield Check("GPUs", "fail", found, advice)
    elif max(fitting) < cluster.gpus_per_node:
        yield Check("GPUs", "fail", found, f"set gpus_per_node to {max(fitting)} or less")
    elif patient.config and patient.config.pretrain.nproc_per_node > cluster.gpus_per_node:
        ranks = patient.config.pretrain.nproc_per_node
        advice = f"set pretrain.nproc_per_node to {cluster.gpus_per_node} or less: one rank for each GPU"
        yield Check("GPUs", "fail", f"{found}, and pretrain.nproc_per_node is {ranks}", advice)
    else:
        yield Check("GPUs", "ok", found)


def _account(patient: Patient) -> Iterator[Check]:
    """Ask the accounting, where there is one, for this user's accounts."""
    if patient.settings.get("AccountingStorageType", "").endswith("none"):
        yield Check("account", "ok", "this Slurm has no accounting; status reads squeue and scontrol alone")
        return
    named = patient.options_of("pretrain").get("account")
    try:
        accounts = patient.slurm.accounts()
    except SlurmError as error:
        yield Check(
            "account", "warn", f"sacctmgr does not answer: {error.answer.splitlines()[0]}", "nothing, if Jobs run"
        )
        return
    found = look_at_account(named, accounts, "pretrain")
    yield Check("account", found.state, found.found, found.remedy)


def _request(patient: Patient) -> Iterator[Check]:
    """Ask sbatch itself whether it would take a pretrain Job: account, QOS, GRES and limits together."""
    cluster, config = patient.cluster, patient.config or Config(name="doctor")
    gpus = gpus_of("pretrain", config, cluster) if patient.config else cluster.gpus_per_node or 0
    tasks = config.pretrain.nproc_per_node if cluster.launcher == "srun" else 1
    flags = [f"--nodes={config.pretrain.nodes}", f"--ntasks-per-node={tasks}"]
    flags += [f"--time={config.pretrain.time}"] if patient.config else []
    flags += option_words(cluster.sbatch_options("pretrain", config.pretrain, gpus))
    try:
        answer = patient.slurm.test_only(flags, "--wrap=true")
    except SlurmError as error:
        failed = _failed("sbatch --test-only", error)
        asked = " ".join(flags)
        yield Check(
            failed.name, "fail", f"{failed.found} (asked for: {asked})", failed.remedy or "mend what is asked for"
        )
    else:
        yield Check("sbatch --test-only", "ok", " ".join(answer.split()).removeprefix("sbatch: "))
        yield from _comments(patient, flags)


def _comments(patient: Patient, flags: list[str]) -> Iterator[Check]:
    """See by one held Job, cancelled at once, whether the site leaves a Job's comment alone: ours are known by it."""
    token, slurm = f"pipeline:doctor:{secrets.token_hex(4)}", replace(patient.slurm, mark="comment")
    job_id = slurm.submit([*flags, "--job-name=pipeline-doctor", "--hold"], "--wrap=true", (), token)
    try:
        job = slurm.jobs([job_id])[job_id]
    finally:
        slurm.cancel([job_id])
    if not job.answered or job.source == "none":
        yield Check("comments", "warn", f"squeue did not show job {job_id}", "call doctor again")
    elif job.comment == token:
        yield Check("comments", "ok", "the comment of a Job stays as it was given")
    elif patient.cluster.job_mark == "name":
        yield Check("comments", "ok", "this site writes comments of its own; Jobs are known by their names")
    else:
        found = f"of the comment {token} Slurm kept {job.comment or 'nothing'}: ours are known by it"
        yield Check("comments", "fail", found, "write job_mark: name into the cluster file")


def _array(patient: Patient) -> Iterator[Check]:
    size = int(patient.settings.get("MaxArraySize", "1001") or 0)
    if size < 2:
        yield Check("MaxArraySize", "fail", f"{size}: this Slurm takes no arrays", "ask an administrator")
    else:
        yield Check("MaxArraySize", "ok", f"{size}: an array has at most {size} tasks")


def _warning(patient: Patient) -> Iterator[Check]:
    """Say how long a Job has to save when it is preempted."""
    lead, mode = patient.cluster.signal_lead, patient.settings.get("PreemptMode", "OFF")
    wait = _leading_number(patient.settings.get("KillWait", ""))
    names = patient.partition_of("pretrain")
    settings = patient.slurm.partition(names[0]) if names else {}
    grace = _leading_number(settings.get("GraceTime", ""))
    mode = settings.get("PreemptMode", mode)
    found = f"KillWait {wait} s, GraceTime {grace} s, PreemptMode {mode}; signal_lead {lead} s"
    if patient.config and time_seconds(patient.config.pretrain.time) <= 2 * lead:
        time = patient.config.pretrain.time
        yield Check(
            "time to save", "fail", f"{found}, pretrain.time {time}", "raise pretrain.time, or lower signal_lead"
        )
    elif not mode.startswith("OFF") and wait + grace < lead:
        advice = (
            f"a preemption leaves {wait + grace} s: where a save takes longer, up to pretrain.save_interval steps are "
            "lost; save more often, or ask for a longer GraceTime"
        )
        yield Check("time to save", "warn", found, advice)
    else:
        yield Check("time to save", "ok", found)


def _leading_number(text: str) -> int:
    digits = re.match(r"[0-9]+", text)
    return int(digits[0]) if digits else 0


def _container(patient: Patient) -> Iterator[Check]:
    if patient.slurm.srun_knows("container-image"):
        yield Check("containers", "ok", "srun knows --container-image")
    elif patient.cluster.image:
        advice = "ask an administrator for Pyxis, or remove image and name a python that has the packages"
        yield Check("containers", "fail", "srun has no --container-image (Pyxis), and image is set", advice)
    else:
        yield Check("containers", "ok", "srun has no --container-image (Pyxis): stages cannot run in an image")


def doctor(cluster: Cluster, config: Config | None) -> tuple[list[Check], int]:
    """Return all checks, and the exit code: 3 where one failed."""
    if cluster.scheduler == "local":
        raise UserError("--cluster: doctor looks at a Slurm; name a cluster file whose scheduler is slurm")
    checks = examine(cluster, config)
    return checks, EXIT_NOT_READY if any(check.state == "fail" for check in checks) else EXIT_DONE


def to_json(checks: list[Check]) -> dict[str, Any]:
    """Return the checks as plain data."""
    return {"ready": all(check.state != "fail" for check in checks), "checks": [asdict(check) for check in checks]}


def print_checks(checks: list[Check], console: Console) -> None:
    """Print a table, one line a check, and what to do below it."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        table.add_row(Text(check.state, STYLES[check.state]), check.name, check.found)
        if check.remedy:
            table.add_row("", "", f"→ {check.remedy}")
    console.print(table)
