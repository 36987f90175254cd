"""The index phase goes on where it was killed: shards that are finished stay as they are, and only those are trusted."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_tokenize_stage import config, hashes, write_lines
from test_tokenizer import corpus

from pipeline.config.schema import Config
from pipeline.lm import pieces
from pipeline.run.attempts import progress
from pipeline.run.folder import Run
from pipeline.stages.tokenize import tokenize

SHARDS = 4


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> Config:
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    return config(write_lines(path, [*corpus(60), *corpus(5)]), shard_tokens=9000)


@pytest.fixture(scope="module")
def encoded(tmp_path_factory: pytest.TempPathFactory, wanted: Config) -> Run:
    """A Run whose pieces are there."""
    run = Run(tmp_path_factory.mktemp("encoded") / "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "SMALLEST", 15_000)
        tokenize(run, wanted, "tokenizer")
    tokenize(run, wanted, "encode")
    assert progress(run, "tokenize", "index") == len(list((run.data / "pieces").iterdir())) > 2
    return run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, encoded: Run, wanted: Config) -> dict[str, str]:
    run = copy(encoded, tmp_path_factory.mktemp("whole"))
    tokenize(run, wanted, "index")
    found = hashes(run)
    assert sum(name.endswith(".bin") for name in found) == SHARDS
    return found


def copy(run: Run, folder: Path) -> Run:
    return Run(shutil.copytree(run.root, folder / "run"))


def is_killed(run: Run, wanted: Config, when: Callable[[Path], bool]) -> bool:
    """Do the index phase in a process that is killed before the rename to a path of which `when` is true."""
    child = os.fork()
    if child == 0:

        def hook(event: str, words: tuple[Any, ...]) -> None:
            if event == "os.rename" and when(Path(words[1])):
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        try:
            tokenize(run, wanted, "index")
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL)
    return status != 0


def finished(run: Run) -> list[str]:
    return sorted(path.stem + ".bin" for path in (run.data / "pieces").glob("*-*.json"))


def files(run: Run, names: list[str]) -> dict[str, tuple[int, int]]:
    """Return inode and mtime of shards: they are others when a shard is written anew."""
    return {name: ((run.data / name).stat().st_ino, (run.data / name).stat().st_mtime_ns) for name in names}


def test_killed_at_each_rename_it_writes_only_what_is_missing(
    tmp_path: Path, encoded: Run, whole: dict[str, str], wanted: Config
) -> None:
    steps = []
    for moment in itertools.count():
        run, renames = copy(encoded, tmp_path / str(moment)), itertools.count()
        before = progress(run, "tokenize", "index")
        if not is_killed(run, wanted, lambda path, moment=moment, renames=renames: next(renames) == moment):
            break
        done = finished(run)
        there = files(run, done)
        steps.append(len(done))
        assert (
            progress(run, "tokenize", "index")
            == before + len(done) + (run.data / "pieces" / "duplicates.json").exists()
        )
        tokenize(run, wanted, "index")
        assert hashes(run) == whole
        assert files(run, done) == there
        assert not list(run.data.glob(".*"))
    # Before the rename of the duplicates, of each shard, of the record of each of these, of the inputs, of the index.
    assert steps == [0, 0, *(number for number in range(SHARDS) for _ in range(2)), SHARDS, SHARDS]


def is_of_shard(path: Path) -> bool:
    """Tell a shard's record, or the index that comes after the last."""
    return path.suffix == ".json" and path.stem != "duplicates"


def test_attempt_after_attempt_one_more_shard_is_there(
    tmp_path: Path, encoded: Run, whole: dict[str, str], wanted: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy(encoded, tmp_path)
    there: dict[str, tuple[int, int]] = {}
    for number in range(1, SHARDS + 1):
        records = itertools.count()
        assert is_killed(run, wanted, lambda path, records=records: is_of_shard(path) and next(records) == 1)
        assert len(finished(run)) == number
        assert there.items() <= files(run, finished(run)).items()
        there = files(run, finished(run))
    tokenize(run, wanted, "index")
    assert f"{SHARDS} of {SHARDS} shards are there; {SHARDS} were there already" in capsys.readouterr().err
    assert hashes(run) == whole
    assert files(run, list(there)) == there


# -- what is not trusted ----------------------------------------------------------------------------------------------


def change(path: Path) -> None:
    """Change one byte, and set the mtime back."""
    status, content = path.stat(), bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def record(shard: Path) -> Path:
    return shard.parent / "pieces" / f"{shard.stem}.json"


def take_the_next(path: Path) -> None:
    """Put another shard there, with its record."""
    other = path.with_name("train-00002.bin")
    shutil.copy(other, path)
    shutil.copy(record(other), record(path))


SPOILS: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: os.truncate(path, path.stat().st_size - 2),
    "one byte": change,
    "missing": Path.unlink,
    "of another shard": take_the_next,
    "torn record": lambda path: os.truncate(record(path), 200),
    "empty record": lambda path: record(path).write_text("{}"),
    "no record": lambda path: record(path).unlink(),
}


@pytest.fixture
def without_index(tmp_path: Path, encoded: Run, wanted: Config) -> Run:
    run = copy(encoded, tmp_path)
    assert is_killed(run, wanted, lambda path: path.name == "index.json")
    assert len(finished(run)) == SHARDS
    return run


@pytest.mark.parametrize("what", SPOILS)
def test_what_is_not_as_recorded_is_written_anew(
    without_index: Run, whole: dict[str, str], wanted: Config, what: str
) -> None:
    run, path = without_index, without_index.data / "train-00001.bin"
    others = files(run, [name for name in finished(run) if name != path.name])
    SPOILS[what](path)
    spoiled = path.stat().st_ino if path.is_file() else None
    tokenize(run, wanted, "index")
    assert hashes(run) == whole
    assert path.stat().st_ino != spoiled
    assert files(run, list(others)) == others


def test_what_was_only_touched_is_hashed_and_stays(without_index: Run, whole: dict[str, str], wanted: Config) -> None:
    path = without_index.data / "train-00001.bin"
    os.utime(path, (1, 1))
    before = files(without_index, finished(without_index))
    tokenize(without_index, wanted, "index")
    assert hashes(without_index) == whole
    assert files(without_index, list(before)) == before


def test_shards_of_another_config_are_written_anew_or_removed(without_index: Run, wanted: Config) -> None:
    run = without_index
    before = files(run, finished(run))
    other = wanted.model_copy(update={"tokenize": wanted.tokenize.model_copy(update={"shard_tokens": 20_000})})
    tokenize(run, other)
    alone = Run(run.root.with_name("alone"))
    tokenize(alone, other)
    assert hashes(run) == hashes(alone)
    assert not set(before.values()) & set(files(run, [path.name for path in run.data.glob("*.bin")]).values())
