"""Slurm's own rules on which the srun lines and the job scripts are built."""

from __future__ import annotations

from pathlib import Path

import pytest
from private_slurm import PrivateSlurm

from pipeline.plan.srun import CPUS


def told(slurm: PrivateSlurm, folder: Path, script: str, *flags: str) -> list[str]:
    log = folder / "log"
    job = slurm.submit(script, f"--output={log}", *flags)
    slurm.wait_for(job, "COMPLETED")
    return log.read_text().split()


@pytest.mark.parametrize(("flags", "cpus"), [(["--exclusive"], "8"), (["--cpus-per-task=4"], "4")])
def test_a_step_has_all_that_its_job_has_on_a_node(
    slurm: PrivateSlurm, tmp_path: Path, flags: list[str], cpus: str
) -> None:
    script = f"LAUNCH=(srun --ntasks=2 --ntasks-per-node=1 {CPUS} printenv SLURM_CPUS_ON_NODE)\n" + '"${LAUNCH[@]}"'
    assert told(slurm, tmp_path, script, "--nodes=2", "--ntasks-per-node=1", *flags) == [cpus] * 2
    several = "srun --overcommit --ntasks=8 --ntasks-per-node=4 printenv SLURM_CPUS_ON_NODE"  # preflight's
    assert told(slurm, tmp_path, several, "--nodes=2", "--ntasks-per-node=1", *flags) == [cpus] * 8
    one = "srun --ntasks=2 --ntasks-per-node=1 --cpus-per-task=1 printenv SLURM_CPUS_ON_NODE"
    assert told(slurm, tmp_path, one, "--nodes=2", "--ntasks-per-node=1", *flags) == ["1"] * 2


def test_each_task_knows_the_jobs_cpus_and_the_address_that_srun_called_from(
    slurm: PrivateSlurm, tmp_path: Path
) -> None:
    script = "srun --ntasks=2 sh -c 'echo $SLURM_JOB_CPUS_PER_NODE/$SLURM_LAUNCH_NODE_IPADDR'"
    words = told(slurm, tmp_path, script, "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=3")
    assert len(words) == 2
    assert all(word.startswith("3(x2)/127.") for word in words)  # all nodes are this machine
