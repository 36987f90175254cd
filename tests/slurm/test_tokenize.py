"""tokenize shared out over a Job array of a real Slurm, with tasks that are requeued and killed in the middle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from private_slurm import PrivateSlurm
from test_chain import PROJECT, Chain

from pipeline.config.load import load_run_config
from pipeline.files import read_json, sha256_file
from pipeline.run.folder import Run
from pipeline.run.job_ledger import read_ledger
from pipeline.stages.tokenize import tokenize

FILES, TASKS = 12, 5

# Before its work, task 2 waits to be requeued; task 3 is killed when the first of its pieces is there, while it works on
# the second, which is a large one.
TROUBLE = r"""
if [[ ${SLURM_RESTART_COUNT:-0} = 0 && ${SLURM_ARRAY_TASK_ID:-} = 2 ]]; then
    LAUNCH=(sleep 300)
elif [[ ${SLURM_RESTART_COUNT:-0} = 0 && ${SLURM_ARRAY_TASK_ID:-} = 3 ]]; then
    LAUNCH=(bash -c '"$@" & while [[ ! -d $0/data/pieces/00003 ]]; do sleep 0.05; done; kill -9 $!; wait $!' "$run" "${LAUNCH[@]}")
fi
"""


@pytest.fixture
def chain(root: Path, tmp_path: Path) -> Iterator[Chain]:
    """A corpus of a dozen sources, which are a dozen pieces, on a Slurm that takes arrays of five tasks."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number, path in enumerate(sorted((PROJECT / "pipeline" / "lm").glob("*.py"))[:FILES]):
        more = "\n".join(str(value**3) for value in range(150_000)) if number == 3 + TASKS else ""
        (corpus / path.name).write_text(path.read_text() + more)
    with PrivateSlurm(root, 2, settings={"MaxArraySize": str(TASKS)}) as slurm:
        chain = Chain(slurm, tmp_path, "shared")
        sources = ", ".join(str(path) for path in sorted(corpus.iterdir()))
        chain.config.write_text(chain.config.read_text().replace(f"data: {tmp_path}/corpus/*.py", f"data: [{sources}]"))
        yield chain


def hashes(run: Run) -> dict[str, str]:
    return {
        path.name: sha256_file(path)
        for pattern in ("*.bin", "*.model", "index.json")
        for path in run.data.glob(pattern)
    }


def test_more_pieces_than_tasks_with_one_requeued_and_one_killed_are_the_same_data(
    chain: Chain, tmp_path: Path
) -> None:
    chain.submit("--only=tokenize", "tokenize.array_tasks=64", "tokenize.validation_fraction=0.4")
    with chain.run.launch("tokenize").open("a") as file:
        file.write(TROUBLE)
    jobs = {job.phase: job for job in read_ledger(chain.run)}
    encode = jobs["encode"].job_id
    assert jobs["encode"].tasks == TASKS  # not 64: this Slurm takes no more
    chain.wait_for("task 2", lambda: chain.run.beginning(f"{encode}_2", 0).is_file(), 90)
    chain.slurm.run("scontrol", "requeue", f"{encode}_2")
    chain.wait_for("the index", chain.run.index.is_file, 150, 0.5)
    for task in (2, 3):
        assert chain.run.beginning(f"{encode}_{task}", 1).is_file(), chain.logs()
        assert read_json(chain.run.verdict(f"{encode}_{task}", 1))["verdict"] == "complete"
    assert read_json(chain.run.verdict(f"{encode}_3", 0))["verdict"] == "crash"
    assert len(read_json(chain.run.pieces)["pieces"]) == FILES
    assert hashes(chain.run) == alone(chain, tmp_path)
    chain.wait_for("an empty queue", lambda: not chain.slurm.run("squeue", "--noheader").stdout, 60)
    assert [(job["phase"], job["state"]) for job in chain.status()["jobs"]] == [
        ("tokenizer", "completed"), ("encode", "completed"), ("index", "completed"),
    ]  # fmt: skip


def alone(chain: Chain, tmp_path: Path) -> dict[str, str]:
    """Return the hashes of the same text tokenized by one process."""
    run = Run(tmp_path / "alone")
    tokenize(run, load_run_config(chain.run.config))
    return hashes(run)
