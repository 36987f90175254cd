"""What a Slurm's partitions and accounts allow, compared with what a config's Jobs will ask for.

`sbatch --test-only` says yes to a time limit that the partition does not allow; the Job then waits for ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Literal, NamedTuple

from pipeline.cluster.schema import Cluster
from pipeline.config.schema import Config
from pipeline.plan.jobs import STAGES
from pipeline.slurm.commands import Partition, Slurm
from pipeline.slurm.errors import SlurmError
from pipeline.slurm.jobs import seconds
from pipeline.slurm.time_limits import time_seconds

ASK_SECONDS = 5.0  # a Slurm that is slower is not asked before a submission: sbatch will say it


class Finding(NamedTuple):
    """One thing about a Stage's Job, and what to do.

    `key` is where it comes from: `time` or `nodes` of the Stage, else an option of sbatch.
    """

    stage: str
    key: Literal["time", "nodes", "partition", "account"]
    state: Literal["ok", "warn", "fail"]
    found: str
    remedy: str = ""


def options_of(cluster: Cluster, config: Config | None, stage: str) -> dict[str, str]:
    """Return the options of a Stage's Job, its GPUs aside."""
    return cluster.sbatch_options(stage, getattr(config, stage) if config else None)


def partition_names(options: dict[str, str], partitions: Sequence[Partition]) -> list[str]:
    """Return the partitions that a Job with these options may run in: those that are named, or the default one."""
    if named := options.get("partition"):
        return named.split(",")
    return [partition.name for partition in partitions if partition.is_default][:1]


def look_at_partitions(
    cluster: Cluster, config: Config | None, partitions: Sequence[Partition], stage: str
) -> Iterator[Finding]:
    """Compare each partition that a Stage's Job may run in with what it will ask for."""
    known = sorted({partition.name for partition in partitions})
    names = partition_names(options_of(cluster, config, stage), partitions)
    if not names:
        advice = f"write partition below sbatch in the cluster file, one of {', '.join(known)}"
        yield Finding(stage, "partition", "fail", "none is named, and this Slurm has no default", advice)
    for name in names:
        rows = [partition for partition in partitions if partition.name == name]
        if not rows:
            yield Finding(stage, "partition", "fail", f"{name}: there is none of this name", _nearest(name, known))
        elif not rows[0].is_up:
            advice = f"ask an administrator, or write one of {', '.join(known)}"
            yield Finding(stage, "partition", "fail", f"{name} takes no Jobs", advice)
        else:
            yield _limits(config, stage, name, rows)


def _limits(config: Config | None, stage: str, name: str, rows: list[Partition]) -> Finding:
    nodes = sum(row.nodes for row in rows)
    found = f"{name}: {nodes} nodes, time limit {rows[0].time_limit}"
    if config is None:
        return Finding(stage, "partition", "ok", found)
    section, limit = getattr(config, stage), seconds(rows[0].time_limit)
    least = getattr(section, "time_min", None) or section.time  # Slurm may shorten a Job down to its time_min
    if limit is not None and time_seconds(least) > limit:
        advice = f"set {stage}.time to {rows[0].time_limit} or less"
        return Finding(stage, "time", "fail", f"{found}, and {stage}.time is {section.time}", advice)
    if stage == "pretrain" and config.pretrain.nodes > nodes:
        advice = "lower pretrain.nodes"
        return Finding(stage, "nodes", "fail", f"{found}, and pretrain.nodes is {config.pretrain.nodes}", advice)
    return Finding(stage, "partition", "ok", found)


def look_at_account(named: str | None, accounts: Sequence[str], stage: str) -> Finding:
    """Compare the account that a Stage's Job names with those of this user."""
    yours = ", ".join(accounts) or "none"
    if named and named not in accounts:
        near = get_close_matches(named, accounts, n=1)
        advice = "mend account below sbatch, or ask an administrator for it"
        return Finding(stage, "account", "fail", f"{named}; yours: {yours}", _did_you_mean(near) + advice)
    return Finding(stage, "account", "ok", named or f"the default one; yours: {yours}")


def _nearest(name: str, known: Sequence[str]) -> str:
    return f"{_did_you_mean(get_close_matches(name, known, n=1))}write one of {', '.join(known)}"


def _did_you_mean(near: list[str]) -> str:
    return f"did you mean {near[0]}? " if near else ""


def misfits(cluster: Cluster, config: Config, slurm: Slurm) -> list[Finding]:
    """Return what Slurm would refuse or never start; nothing where it does not answer soon. One call, seldom three."""
    try:
        partitions = slurm.partitions(hidden=True, timeout=ASK_SECONDS)
    except SlurmError:
        return []
    if not partitions:
        return []
    found = [finding for stage in STAGES for finding in _of_stage(cluster, config, partitions, stage)]
    return found + _unknown_accounts(cluster, config, slurm)


def _of_stage(cluster: Cluster, config: Config, partitions: Sequence[Partition], stage: str) -> list[Finding]:
    """Return what is amiss with a Stage's partitions: a warning where another one, or a QOS, may take the Job."""
    findings = list(look_at_partitions(cluster, config, partitions, stage))
    another = any(finding.state == "ok" for finding in findings)
    qos = "qos" in options_of(cluster, config, stage)  # which may lift limits

    def weighed(finding: Finding) -> Finding:
        lifted = qos and finding.key in ("time", "nodes")
        down = finding.found.endswith("takes no Jobs")  # for now
        return finding._replace(state="warn") if another or lifted or down else finding

    return [weighed(finding) for finding in findings if finding.state != "ok"]


def _unknown_accounts(cluster: Cluster, config: Config, slurm: Slurm) -> list[Finding]:
    """Return the accounts that are not this user's: a warning where this Slurm takes any."""
    named = {stage: account for stage in STAGES if (account := options_of(cluster, config, stage).get("account"))}
    if not named:
        return []
    try:
        accounts = slurm.accounts(ASK_SECONDS)
        found = [look_at_account(account, accounts, stage) for stage, account in named.items()] if accounts else []
        found = [finding for finding in found if finding.state != "ok"]
        enforced = "associations" in slurm.config().get("AccountingStorageEnforce", "") if found else True
    except SlurmError:
        return []
    return found if enforced else [finding._replace(state="warn") for finding in found]
