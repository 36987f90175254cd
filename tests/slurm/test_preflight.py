"""Preflight on a real Slurm: alone, on the nodes that a person chooses, and what it says of one that is unfit."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from private_slurm import PrivateSlurm
from test_chain import Chain, folder

from pipeline.files import read_json
from pipeline.run.attempts import all_attempts
from pipeline.run.folder import Run
from pipeline.slurm.bad_nodes import BadNodes

__all__ = ["folder"]  # a fixture


@pytest.fixture(scope="module")
def chain(slurm: PrivateSlurm, folder: Path) -> Chain:
    return Chain(slurm, folder, "looks")


def ended(chain: Chain, job_id: str) -> Run:
    def settled() -> bool:  # by the batch shell, after the ranks
        return chain.run.verdict(job_id, 0).is_file()

    chain.wait_for("preflight to end", settled, 120)
    return chain.run


def test_it_runs_alone_on_all_nodes_of_a_job(chain: Chain) -> None:
    chain.submit("--only", "preflight")
    job_id = chain.job("preflight")
    run = ended(chain, job_id)
    assert read_json(run.verdict(job_id, 0))["verdict"] == "complete", chain.logs()
    report = read_json(run.preflight(job_id, 0))
    assert len({node["node"] for node in report["nodes"]}) == 2
    assert report["all_reduce"]["backend"] == "gloo"
    assert run.sinfo(job_id, 0).read_text().startswith("NODELIST")


def make_unfit(chain: Chain, which: str) -> None:
    """Let a node's ranks look for their head where nobody is."""
    rank = chain.run.snapshot / "sbatch" / "rank.sh"
    unfit = f"if [[ {which} ]]; then export MASTER_ADDR=nope.invalid; fi"
    rank.write_text(rank.read_text().replace("exec ", f"{unfit}\nexec "))


def test_by_hand_on_chosen_nodes_it_names_the_unfit_one(chain: Chain, slurm: PrivateSlurm) -> None:
    make_unfit(chain, "$SLURMD_NODENAME = n2")
    done = subprocess.run(
        ["sbatch", "--parsable", "-N2", "-w", "n[2-3]", "--mem=2000M", f"--chdir={chain.run.root}",
         str(chain.run.snapshot / "sbatch" / "preflight.sbatch"), str(chain.run.root)],
        env=chain.environment, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    job_id = done.stdout.strip()
    run = ended(chain, job_id)
    verdict = read_json(run.verdict(job_id, 0))
    assert (verdict["verdict"], verdict["nodes"]) == ("environment", ["n2"]), chain.logs()
    assert "nope.invalid" in verdict["reason"]
    assert take_back(chain) == ["n2"]


def take_back(chain: Chain) -> list[str]:
    """Return the nodes that were put on the cluster's list of bad ones, and clear it: the other tests want them."""
    listed = BadNodes(chain.run.root.parent / ".site")
    names = list(listed.read())
    shutil.rmtree(listed.folder, ignore_errors=True)
    return names


def test_training_leaves_an_unfit_node_and_goes_on_elsewhere(slurm: PrivateSlurm, folder: Path) -> None:
    chain = Chain(slurm, folder, "elsewhere")
    chain.submit()
    job_id = chain.job("pretrain")
    make_unfit(chain, f"$SLURM_NODEID.$SLURM_JOB_ID = 1.{job_id}")
    chain.wait_for_state("completed", 240)
    unfit = read_json(chain.run.beginning(job_id, 0))["nodes"][1]
    assert read_json(chain.run.verdict(job_id, 0))["nodes"] == [unfit], chain.logs()
    last = all_attempts(chain.run, "pretrain")[-1]
    assert last.begin is not None
    assert unfit not in last.begin.nodes
    assert take_back(chain) == [unfit]
