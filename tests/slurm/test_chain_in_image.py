"""The whole chain in the training image: two nodes with two ranks each, preempted on the way."""

from __future__ import annotations

from pathlib import Path

from private_slurm import PrivateSlurm
from test_chain import Chain, folder

from pipeline.files import read_json, read_lines

__all__ = ["folder"]  # a fixture


def test_the_chain_runs_in_the_image_and_resumes_after_preemption(
    slurm: PrivateSlurm, folder: Path, image: Path
) -> None:
    chain = Chain(slurm, folder, "boxed")
    # On this machine itself /usr/bin/python3 knows no torch: what trains is in the image.
    chain.cluster.write_text(chain.cluster.read_text() + f"image: {image}\npython: /usr/bin/python3\n")
    chain.submit("pretrain.nproc_per_node=2", slow=0.3)
    job = chain.job("pretrain")
    chain.wait_for_step(15, 180)
    slurm.submit("sleep 5", "--partition=high", "--nodes=3", "--exclusive")
    chain.wait_for("attempt 1", lambda: chain.run.beginning(job, 1).is_file(), 120)
    chain.wait_for_state("completed", 240)
    assert f"--container-image={image}" in chain.run.launch("pretrain").read_text()
    assert len(read_json(chain.run.checkpoint(60) / "manifest.json")["files"]) >= 4
    assert [row["step"] for row in read_lines(chain.run.metrics)] == list(range(1, 61))
    assert chain.run.report.is_file()
