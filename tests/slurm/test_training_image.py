"""The training image in containers on a real Slurm: what the stages need of it is there."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import training_image
from private_slurm import PrivateSlurm

PROJECT = training_image.PROJECT


def run(slurm: PrivateSlurm, image: Path, *words: str) -> list[str]:
    mounts = f"--container-mounts={PROJECT / 'pipeline'}:/code/pipeline:ro"
    call = ("srun", "--mem=2000M", f"--container-image={image}", "--container-readonly", mounts, *words)
    return slurm.run(*call, timeout=200).stdout.splitlines()


def test_the_packages_of_the_stages_are_in_it(slurm: PrivateSlurm, image: Path) -> None:
    script = (
        "import sys, torch, sentencepiece, datasets, safetensors, pydantic, yaml; print(torch.__version__, sys.prefix)"
    )
    (line,) = run(slurm, image, "python3", "-c", script)
    assert line.startswith("2.13.0")
    assert line.endswith(" /usr")


def test_the_pipeline_runs_in_it_from_a_mounted_folder(slurm: PrivateSlurm, image: Path) -> None:
    script = "cd /; PYTHONPATH=/code PYTHONDONTWRITEBYTECODE=1 exec python3 -m pipeline --version"
    assert run(slurm, image, "sh", "-c", script)


def test_ranks_of_two_nodes_meet_in_it(slurm: PrivateSlurm, image: Path, note: Callable[[str], None]) -> None:
    script = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo", rank=int(os.environ["SLURM_PROCID"]), world_size=int(os.environ["SLURM_NTASKS"]))
total = torch.ones(1); dist.all_reduce(total); print(os.environ["SLURMD_NODENAME"], int(total)); dist.destroy_process_group()
"""
    exports = ["env", "MASTER_ADDR=n1", f"MASTER_PORT={21000 + os.getpid() % 1000}", "GLOO_SOCKET_IFNAME=lo"]
    before = time.monotonic()
    lines = run(slurm, image, "-w", "n[1-2]", "--ntasks-per-node=2", "-K", *exports, "python3", "-c", script)
    note(f"{time.monotonic() - before:.1f} s for two ranks on each of two nodes to start, meet and end")
    assert sorted(lines) == ["n1 4", "n1 4", "n2 4", "n2 4"]


def test_no_srun_is_in_it(slurm: PrivateSlurm, image: Path) -> None:
    assert run(slurm, image, "sh", "-c", "command -v srun scontrol sbatch || echo none") == ["none"]


def test_it_is_kept_outside_the_repository_and_named_by_its_inputs(image: Path) -> None:
    assert PROJECT not in image.resolve().parents
    assert training_image.find_or_build() == image


@pytest.mark.parametrize(("age", "kept"), [(13, True), (15, False)])
def test_an_image_that_is_long_unused_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age: int, kept: bool
) -> None:
    monkeypatch.setenv("PIPELINE_IMAGE_CACHE", str(tmp_path))
    image, record = tmp_path / "pipeline-cpu-0.sqsh", tmp_path / "pipeline-cpu-0.json"
    for path in (image, record):
        path.touch()
    os.utime(image, (time.time() - age * 86400,) * 2)
    training_image.remove_unused()
    assert (image.exists(), record.exists()) == (kept, kept)
