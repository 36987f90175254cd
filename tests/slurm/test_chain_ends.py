"""How chains end on a real Slurm: failures that leave nothing behind, stops at bad moments, calls that race."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from private_slurm import PrivateSlurm
from slurm_packages import reason
from test_chain import Chain, folder

from pipeline.files import read_json

__all__ = ["folder"]  # a fixture


def queue(chain: Chain) -> list[str]:
    """List the states of this Run's Jobs that Slurm still has in its queue."""
    lines = chain.slurm.run("squeue", "--noheader", "--format=%T|%j").stdout.splitlines()
    return [line.split("|")[0] for line in lines if line.split("|")[1].startswith(f"{chain.run.name}-")]


def test_a_failing_stage_leaves_nothing_pending(slurm: PrivateSlurm, folder: Path) -> None:
    chain = Chain(slurm, folder, "fails")
    (folder / "empty").mkdir()
    (folder / "empty" / "one.txt").write_text("too little")
    chain.config.write_text(chain.config.read_text().replace("/corpus/*.py", "/empty/*.txt"))
    chain.submit()
    chain.wait_for_state("failed", 90)
    chain.wait_for("an empty queue", lambda: not queue(chain), 60)
    assert "too little data" in chain.status()["jobs"][0]["reason"]


def test_two_submits_at_once_make_one_chain(slurm: PrivateSlurm, folder: Path) -> None:
    chain = Chain(slurm, folder, "races")
    words = chain.command("submit", chain.config, "--cluster", chain.cluster)
    racers = [
        subprocess.Popen(words, env=chain.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for _ in range(3)
    ]
    codes = sorted(racer.wait(60) for racer in racers)
    assert codes[0] == 0
    assert set(codes) <= {0, 3}  # 3: another submit holds the Run at this moment
    names = slurm.run("squeue", "--noheader", "--states=all", "--format=%j").stdout.split()
    assert sorted(name.rpartition("-")[0] for name in names if name.startswith("races-")) == [
        "races-evaluate", "races-inference", "races-pretrain", "races-tokenize",
    ]  # fmt: skip
    chain.verb("cancel", chain.run.root)
    chain.wait_for("an empty queue", lambda: not queue(chain), 60)


def test_a_stop_during_preflight_ends_the_chain_and_resume_goes_on(slurm: PrivateSlurm, folder: Path) -> None:
    chain = Chain(slurm, folder, "stops")
    chain.submit()
    job = chain.job("pretrain", 1)
    chain.wait_for("preflight", lambda: chain.run.beginning(job, 0).is_file(), 120)
    chain.verb("stop", chain.run.root)
    chain.wait_for("an empty queue", lambda: not queue(chain), 120)
    assert read_json(chain.run.verdict(job, 0))["verdict"] == "stopped", chain.logs()
    assert chain.status()["state"] == "stopped"
    assert not chain.run.checkpoint_steps()
    chain.verb("resume", chain.run.root)
    chain.wait_for_state("completed", 240)


def test_with_accounting_a_forgotten_job_is_told_by_sacct(root: Path, folder: Path) -> None:
    if why := reason(accounting=True):
        pytest.skip(why)
    with PrivateSlurm(root, 2, accounting=True, settings={"MinJobAge": "2"}) as slurm:
        chain = Chain(slurm, folder, "counted")
        chain.submit("--only", "tokenize")
        job = chain.job("tokenize")
        chain.wait_for("the verdict", chain.run.verdict(job, 0).is_file, 90)
        shutil.rmtree(chain.run.attempt(job, 0))  # or nobody would ask Slurm
        chain.wait_for(
            "squeue to forget", lambda: job not in slurm.run("squeue", "-h", "-t", "all", "-o", "%A").stdout, 90
        )
        status = chain.status()
        assert "sacct" in status["source"], status
        assert status["jobs"][0]["state"] == "completed"
