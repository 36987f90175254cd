"""What status asks a real Slurm: priorities and fair share where they are kept, silence where not; few calls in all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from private_slurm import PrivateSlurm
from slurm_packages import reason

from pipeline.slurm.bad_nodes import BadNode
from pipeline.slurm.commands import Slurm
from pipeline.slurm.errors import SlurmError
from pipeline.slurm.exclusion import choose_exclusion
from pipeline.slurm.jobs import SlurmJob


@pytest.fixture
def reach(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Let this process's own calls reach no Slurm but the one that `use` names."""
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    return monkeypatch


def use(slurm: PrivateSlurm, reach: pytest.MonkeyPatch) -> Slurm:
    for name in ("SLURM_CONF", "PATH"):
        reach.setenv(name, slurm.env[name])
    return Slurm()


def test_without_accounting_priorities_have_no_parts(slurm: PrivateSlurm, reach: pytest.MonkeyPatch) -> None:
    asked = use(slurm, reach)
    done, waits = slurm.submit("true"), slurm.submit("true", "--hold")
    slurm.wait_for(done, "COMPLETED")
    found = asked.jobs([done, waits, "400"])
    assert [job.state for job in found.values()] == ["completed", "pending", "unknown"]
    assert all(job.answered for job in found.values())
    with pytest.raises(SlurmError, match="not running a supported priority plugin"):
        asked.priorities([waits])
    assert asked.fair_share() == {}


def test_scontrol_shows_all_jobs_by_one_call(slurm: PrivateSlurm, reach: pytest.MonkeyPatch) -> None:
    asked = use(slurm, reach)
    ids = [slurm.submit("true", "--hold") for _ in range(3)]
    text = asked.run(["scontrol", "-o", "show", "job"])
    assert {f"JobId={job}" for job in ids} <= set(text.split())


def test_no_more_bad_nodes_are_excluded_than_a_job_can_spare(slurm: PrivateSlurm, reach: pytest.MonkeyPatch) -> None:
    asked, script = use(slurm, reach), slurm.root / "any.sh"
    script.write_text("#!/bin/sh\n")
    bad = [BadNode(name, "ECC errors", float(age), "x") for age, name in enumerate(("n1", "n2"))]

    def excluded(**flags: str) -> list[str]:
        return choose_exclusion(asked, {"mem": "100M"} | flags, str(script), bad).names

    assert [excluded(nodes=nodes) for nodes in ("1", "2", "3")] == [["n1", "n2"], ["n2"], []]
    assert excluded(nodes="1", exclude="n3") == ["n2"]
    assert excluded(nodes="4") == ["n1", "n2"]  # no such Job could start in any case
    job = slurm.submit("true", "--hold", "--nodes=2")
    asked.update(job, ExcNodeList="n2,n3")
    asked.run(["scontrol", "release", job])
    slurm.processes.wait_for("slurmctld", lambda: asked.jobs([job])[job].lacks_nodes)
    assert asked.excluded([job]) == {job: "n[2-3]"}
    asked.run(["scontrol", "update", "nodename=n3", "state=drain", "reason=test"])
    try:
        assert excluded(nodes="1") == ["n2"]
    finally:
        asked.run(["scontrol", "update", "nodename=n3", "state=resume"])
    asked.update(job, ExcNodeList="")
    slurm.wait_for(job, "COMPLETED")


def test_with_accounting_sacct_knows_what_squeue_has_forgotten(root: Path, reach: pytest.MonkeyPatch) -> None:
    if why := reason(accounting=True):
        pytest.skip(why)
    settings = {
        "MinJobAge": "2",
        "PriorityWeightAge": "1000",
        "PriorityWeightFairshare": "2000",
        "PriorityWeightJobSize": "500",
    }
    with PrivateSlurm(root, 1, accounting=True, settings=settings) as slurm:
        asked = use(slurm, reach)
        failed = slurm.submit("exit 7")
        slurm.wait_for(failed, "FAILED")
        runs, waits = slurm.submit("sleep 100", "--exclusive"), slurm.submit("true")
        slurm.wait_for(runs, "RUNNING")
        priority = asked.priorities([waits])[waits]
        assert priority.total >= priority.parts["size"] > 0
        assert all(0 <= share <= 1 for share in asked.fair_share().values())
        assert "default" in asked.fair_share()
        job: SlurmJob = wait_for_sacct(asked, slurm, failed)
        assert (job.state, job.exit_code) == ("failed", 7)


def wait_for_sacct(asked: Slurm, slurm: PrivateSlurm, job_id: str) -> SlurmJob:
    """Return what is known of a Job once the controller has forgotten it, which it does now and then."""
    slurm.processes.wait_for("slurmctld", lambda: asked.jobs([job_id])[job_id].source == "sacct", 90)
    return asked.jobs([job_id])[job_id]
