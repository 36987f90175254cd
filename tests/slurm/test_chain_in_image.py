"""The whole chain in the training image: two nodes with two ranks each, preempted on the way, with secrets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from private_slurm import PrivateSlurm
from test_chain import Chain, folder

from pipeline.files import read_json, read_lines

__all__ = ["folder"]  # a fixture

PLANTED = re.compile(rb"planted-in-(a-file|the-environment)")


class Boxed(Chain):
    """A chain in an image, whose submitter has a secret in the environment."""

    @property
    def environment(self) -> dict[str, str]:
        return super().environment | {"SECRET_OF_ENVIRONMENT": "planted-in-the-environment"}


@pytest.fixture
def local_disk(slurm: PrivateSlurm) -> Iterator[Path]:
    """A folder that is each node's own disk; that of n2 is full."""
    place = slurm.root / "local"
    place.mkdir()
    slurm.on_host("n2", "mount", "-t", "tmpfs", "-o", "size=1m", "none", place)
    yield place
    slurm.on_host("n2", "umount", "--lazy", place)


def processes(file: str, pattern: str) -> list[bytes]:
    """Return /proc/PID/FILE of the processes whose command line matches."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if re.search(pattern, (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")):
                found.append((path / file).read_bytes())
        except OSError:
            continue
    return found


def artefacts(chain: Chain) -> dict[str, bytes]:
    """Collect all that a Run leaves behind, and what Slurm and the kernel tell everybody about it."""
    found = {str(path): path.read_bytes() for path in chain.run.root.rglob("*") if path.is_file()}
    found |= {str(path): path.read_bytes() for path in (chain.slurm.root / "log").glob("*")}
    found["scontrol show job"] = chain.slurm.run("scontrol", "--details", "show", "job").stdout.encode()
    for stage in ("tokenize", "pretrain", "evaluate", "inference"):
        job = chain.job(stage)
        found[f"script of {stage}"] = chain.slurm.run("scontrol", "write", "batch_script", job, "-").stdout.encode()
    found["status"] = chain.verb("status", chain.run.root, "--json").encode()
    found["plan"] = chain.verb("submit", chain.config, "--cluster", chain.cluster, "--dry-run", *RANKS).encode()
    return found


RANKS = ("pretrain.nproc_per_node=2",)


def test_the_chain_runs_in_the_image_and_resumes_after_preemption(
    slurm: PrivateSlurm, folder: Path, image: Path, local_disk: Path
) -> None:
    chain = Boxed(slurm, folder, "boxed")
    secrets = folder / "secrets"
    secrets.write_text("SECRET_OF_FILE=planted-in-a-file\n")
    secrets.chmod(0o600)
    # On this machine itself /usr/bin/python3 knows no torch: what trains is in the image.
    more = [f"image: {image}", "python: /usr/bin/python3", f"image_cache: {local_disk}"]
    more += ["secret_env: [SECRET_OF_FILE, SECRET_OF_ENVIRONMENT]", f"secret_file: {secrets}"]
    chain.cluster.write_text(chain.cluster.read_text() + "\n".join(more) + "\n")
    chain.submit(*RANKS, slow=0.3)
    job = chain.job("pretrain")
    chain.wait_for_step(15, 180)

    (copy,) = local_disk.rglob("*.sqsh")
    assert copy.stem == read_json(chain.run.record)["image_sha256"]
    lines = b"\0".join(processes("cmdline", str(chain.run.root)))
    assert f"--container-image={copy}".encode() in lines
    assert not PLANTED.search(lines)
    reached = [len(set(PLANTED.findall(text))) for text in processes("environ", r"stages\.pretrain")]
    assert reached.count(2) >= 4  # each rank has both

    slurm.submit("sleep 5", "--partition=high", "--nodes=3", "--exclusive")
    chain.wait_for("the next Segment", lambda: chain.run.beginning(chain.job("pretrain", 2), 0).is_file(), 120)
    chain.wait_for_state("completed", 240)
    assert f"--container-image={image}" in chain.run.launch("pretrain").read_text()
    assert len(read_json(chain.run.checkpoint(60) / "manifest.json")["files"]) >= 4
    assert [row["step"] for row in read_lines(chain.run.metrics)] == list(range(1, 61))
    assert chain.run.report.is_file()
    without = [event for event in read_lines(chain.run.events) if event["event"] == "image not copied"]
    assert {event["node"] for event in without} == {"n2"}
    assert "n2 starts from the shared disk" in chain.run.log("pretrain", job, 0).read_text()
    told = artefacts(chain)
    assert len(told) > 80
    assert [name for name, text in told.items() if PLANTED.search(text)] == []
