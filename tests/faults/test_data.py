"""The tokens, the tokenizer, the Config or the number of ranks change between two attempts: refused by name, or told."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from by_hand import Attempt, events, losses, make_data, make_run, processes_of, weights

from pipeline.files import read_json, read_lines, write_json
from pipeline.run.folder import Run

STEPS = 20
KEYS = (f"pretrain.max_steps={STEPS}", "pretrain.save_interval=10")
STOPPED = "rank=0,step=14,do=term"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    return make_data(tmp_path_factory.mktemp("data"), corpus)


@pytest.fixture(scope="module")
def twins(data: Path) -> dict[int, Run]:
    runs = {ranks: make_run(data, f"twin-{ranks}", *KEYS, f"pretrain.nproc_per_node={ranks}") for ranks in (1, 2)}
    assert [Attempt(run).wait(120) for run in runs.values()] == [0, 0]
    return runs


def stopped_run(data: Path, name: str, ranks: int = 1) -> Run:
    run = make_run(data, name, *KEYS, f"pretrain.nproc_per_node={ranks}")
    assert Attempt(run, inject=STOPPED).wait() == 75
    return run


def shard(run: Run) -> Path:
    return run.data / "train-00000.bin"


def change(run: Run) -> None:
    """Change one byte of a shard, and set its mtime back."""
    status, content = shard(run).stat(), bytearray(shard(run).read_bytes())
    content[100] ^= 1
    shard(run).write_bytes(content)
    os.utime(shard(run), ns=(status.st_atime_ns, status.st_mtime_ns))


def cut(run: Run) -> None:
    os.truncate(shard(run), shard(run).stat().st_size - 1)


def swap_tokens(run: Run) -> None:
    """Put other shards there, whole and with an index of their own."""
    index = read_json(run.index)
    (train,), (other,) = (index["splits"][name]["shards"] for name in ("train", "validation"))
    shutil.copy(run.data / other["file"], shard(run))
    index["splits"]["train"] |= {key: index["splits"]["validation"][key] for key in ("documents", "bytes", "tokens")}
    index["splits"]["train"]["shards"] = [other | {"file": train["file"]}]
    write_json(run.index, index)


CHANGES: dict[str, tuple[Callable[[Run], None], str]] = {
    "one byte": (change, "train-00000.bin: the content is not what tokenize wrote"),
    "cut": (cut, "train-00000.bin: this token shard has"),
    "missing": (lambda run: shard(run).unlink(), "train-00000.bin: this token shard is in the index, but not on disk"),
    "other tokens": (swap_tokens, "it was trained with other token shards"),
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("what", CHANGES)
def test_changed_tokens_are_refused(data: Path, twins: dict[int, Run], what: str, ranks: int) -> None:
    spoil, reason = CHANGES[what]
    run = stopped_run(data, f"{what.replace(' ', '-')}-{ranks}", ranks)
    saved = shutil.copytree(run.data, run.root / "saved")
    spoil(run)
    attempt = Attempt(run, number=1)
    assert attempt.wait() == 2, attempt.text()
    assert attempt.verdict["verdict"] == "config"
    assert reason in attempt.verdict["reason"]
    assert "Traceback" not in attempt.text().partition("ChildFailedError")[0].partition("torch/distributed")[0]
    assert not processes_of(run)
    shutil.rmtree(run.data)
    saved.rename(run.data)
    again = Attempt(run, number=2)
    assert again.wait() == 0, again.text()
    assert (losses(run), weights(run, STEPS)) == (losses(twins[ranks]), weights(twins[ranks], STEPS))


def test_a_touched_shard_goes_on(data: Path, twins: dict[int, Run]) -> None:
    run = stopped_run(data, "touched")
    os.utime(shard(run), (1, 1))
    assert Attempt(run, number=1).wait() == 0
    assert [event["hashed"] for event in events(run, "shards verified")] == [1, 1]
    assert losses(run) == losses(twins[1])


def test_a_shard_as_it_was_is_not_hashed_again(data: Path) -> None:
    run = stopped_run(data, "same")
    assert Attempt(run, number=1).wait() == 0
    assert len(events(run, "shards verified")) == 1
    assert not events(run, "changed")


def test_another_config_and_number_of_ranks_are_told(data: Path) -> None:
    run = stopped_run(data, "config", 2)
    other = make_run(data, "other", *KEYS, "pretrain.learning_rate=0.001")
    shutil.rmtree(other.checkpoints, ignore_errors=True)
    shutil.copytree(run.checkpoints, other.checkpoints)
    assert Attempt(other).wait() == 0
    (told,) = events(other, "changed")
    assert told["changes"] == [
        "pretrain.nproc_per_node: 2 -> 1", "pretrain.learning_rate: 0.003 -> 0.001", "ranks: 2 -> 1",
    ]  # fmt: skip


@pytest.mark.parametrize(("stage", "outputs"), [("evaluate", "scores"), ("inference", "samples")])
def test_another_tokenizer_scores_and_samples_nothing(data: Path, stage: str, outputs: str) -> None:
    run = stopped_run(data, f"tokenizer-{stage}")
    for checkpoint in map(run.checkpoint, run.checkpoint_steps()):
        assert read_json(checkpoint / "manifest.json")["tokenizer"] == read_json(run.index)["tokenizer"]["fingerprint"]
    # Another model of the same vocabulary: trained on other text, by the same command.
    corpus = run.root / "corpus"
    corpus.mkdir()
    for number in range(40):
        (corpus / f"{number}.txt").write_text(f"other words {number} of another language entirely\n" * 40)
    folder = run.root / "elsewhere"
    folder.mkdir()
    config = make_data(folder, corpus)
    shutil.copy(config.parent / "runs" / "micro" / "data" / "tokenizer.model", run.tokenizer)
    attempt = Attempt(run, number=1, stage=stage, job=stage)
    assert attempt.wait() == 2, attempt.text()
    assert "tokenizer" in attempt.verdict["reason"]
    assert not (run.root / outputs).exists() or not list((run.root / outputs).rglob("step-*.json*"))


def test_a_changed_validation_shard_is_not_scored(data: Path) -> None:
    run = stopped_run(data, "validation")
    path = run.data / "validation-00000.bin"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    attempt = Attempt(run, number=1, stage="evaluate", job="evaluate")
    assert attempt.wait() == 2, attempt.text()
    assert "validation-00000.bin: the content is not what tokenize wrote" in attempt.verdict["reason"]
    assert read_lines(run.events)[-1]["verdict"] == "config"
