"""What a Slurm does not allow is said before anything is submitted, with file and line: limits, partitions, accounts."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from slurm_site import Site

Pipeline = Callable[..., subprocess.CompletedProcess[str]]

SINFO = """\
gpu*|up|1-00:00:00|16|128|2000000|gpu:h100:8(S:0-1)
cpu|up|infinite|4|64|256000|(null)
old|down|1:00:00|1|8|1000|(null)
"""
VERBS = {
    "submit": ("submit", ()),
    "test": ("submit", ("--test",)),
    "dry run": ("submit", ("--dry-run",)),
    "plan": ("plan", ()),
    "plan as JSON": ("plan", ("--json",)),
}


@pytest.fixture
def site(tmp_path: Path, micro: Path, pipeline: Pipeline) -> Site:
    site = Site(tmp_path, micro, pipeline)
    (site.folder / "sinfo.answer").write_text(SINFO)
    return site


def call(site: Site, verb: str, *words: str) -> subprocess.CompletedProcess[str]:
    name, flags = VERBS[verb]
    return site.pipeline(name, site.micro, "--cluster", site.cluster, *words, *flags, **site.changes)


def asked(site: Site) -> list[str]:
    return [line.split()[0] for line in (site.folder / "calls").read_text().splitlines()]


@pytest.mark.parametrize("verb", VERBS)
def test_a_time_above_the_partitions_limit_is_a_mistake_of_the_config(site: Site, verb: str) -> None:
    site.micro.write_text(site.micro.read_text().replace("pretrain:\n", "pretrain:\n  time: 2-00\n"))
    line = site.micro.read_text().splitlines().index("  time: 2-00") + 1
    refused = call(site, verb)
    assert refused.returncode == 2, refused.stderr
    assert f"micro.yaml:{line}: pretrain.time: gpu: 16 nodes, time limit 1-00:00:00" in refused.stderr
    assert "set pretrain.time to 1-00:00:00 or less" in refused.stderr
    assert site.queue == {}
    assert not site.run.root.exists()
    assert asked(site).count("sinfo") == 1


def test_an_override_is_named_as_what_it_is(site: Site) -> None:
    assert "override pretrain.time=2-00: pretrain.time" in call(site, "submit", "pretrain.time=2-00").stderr.replace(
        "'", ""
    )


def test_an_unknown_partition_is_named_with_the_nearest(site: Site) -> None:
    site.cluster.write_text(site.cluster.read_text().replace("partition: gpu,", "partition: gpus,"))
    refused = call(site, "submit")
    assert refused.returncode == 2
    assert "ours.yaml:4: sbatch.partition: gpus: there is none of this name; did you mean gpu?" in refused.stderr
    assert refused.stderr.count("none of this name") == 1


def test_options_of_one_stage_are_named_where_they_stand(site: Site) -> None:
    site.cluster.write_text(site.cluster.read_text().replace("partition: cpu", "partition: cpux"))
    assert "ours.yaml:5: stages.tokenize.sbatch.partition" in call(site, "submit").stderr
    refused = call(site, "submit", "tokenize.sbatch={partition: cpuy}")
    assert "tokenize.sbatch.partition: cpuy: there is none" in refused.stderr


def test_an_account_that_is_not_yours(site: Site) -> None:
    (site.folder / "sacctmgr.answer").write_text("lm2\nother\n")
    (site.folder / "scontrol.answer").write_text("AccountingStorageEnforce = associations,limits\n")
    refused = call(site, "submit")
    assert refused.returncode == 2
    assert "ours.yaml:4: sbatch.account: lm; yours: lm2, other; did you mean lm2?" in refused.stderr
    (site.folder / "scontrol.answer").write_text("AccountingStorageEnforce = none\nMaxArraySize = 1001\n")
    planned = call(site, "plan")
    assert planned.returncode == 0
    assert "warning: " in planned.stdout + planned.stderr


def test_what_a_qos_or_another_partition_may_lift_is_a_warning(site: Site) -> None:
    long = call(site, "plan", "pretrain.time=2-00", "pretrain.sbatch={qos: long}")
    assert (long.returncode, "warning" in long.stdout + long.stderr) == (0, True)
    either = call(site, "plan", "pretrain.time=2-00", "pretrain.sbatch={partition: 'gpu,cpu'}")
    assert (either.returncode, "warning" in either.stdout + either.stderr) == (0, True)


def test_where_slurm_does_not_answer_nothing_is_said(site: Site) -> None:
    (site.folder / "sinfo.answer").unlink()
    assert call(site, "plan", "pretrain.time=2-00").returncode == 0
    (site.folder / "sinfo.answer").write_text("")
    assert call(site, "plan", "pretrain.time=2-00").returncode == 0


def test_stages_that_are_not_asked_for_are_not_looked_at(site: Site) -> None:
    result = call(site, "submit", "pretrain.time=2-00", "--only", "tokenize")
    assert result.returncode == 0, result.stderr


def test_resume_says_it_of_the_runs_own_files(site: Site) -> None:
    site.submit()
    (site.folder / "sinfo.answer").write_text(SINFO.replace("1-00:00:00", "30:00"))
    refused = site.verb("resume", site.run.root)
    assert refused.returncode == 2
    assert "runs/micro/config.yaml:" in refused.stderr
