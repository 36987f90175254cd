"""A shard that is not what tokenize wrote is refused by name; one that was hashed is not hashed again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from test_shards import DOCUMENTS, write

from pipeline.errors import UserError
from pipeline.files import read_json, write_json
from pipeline.lm.shards import INDEX, TokenShards
from pipeline.lm.verified import verify_shards


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """Return the record of two shards in data/, looked at once."""
    write(tmp_path / "data", DOCUMENTS)
    assert look(tmp_path / "verified.json") == (2, 2)
    return tmp_path / "verified.json"


def look(record: Path) -> tuple[int, int]:
    found = verify_shards(TokenShards(record.with_name("data"), "train"), record)
    return found.shards, found.hashed


def change(path: Path) -> None:
    """Change one byte in place, and hide it as well as one can."""
    status, content = path.stat(), bytearray(path.read_bytes())
    content[3] ^= 1
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_what_was_hashed_is_not_hashed_again(record: Path) -> None:
    assert look(record) == (2, 0)


def test_a_touched_shard_is_hashed_and_goes_on(record: Path) -> None:
    os.utime(record.with_name("data") / "train-00001.bin", (1, 1))
    assert look(record) == (2, 1)
    assert look(record) == (2, 0)


def test_a_changed_byte_is_refused_by_name_each_time(record: Path) -> None:
    change(record.with_name("data") / "train-00001.bin")
    for _ in range(2):
        with pytest.raises(UserError, match=r"train-00001\.bin: the content is not what tokenize wrote") as error:
            look(record)
        assert "train-00000.bin" not in str(error.value)


def test_a_copy_is_hashed_once(record: Path) -> None:
    path = record.with_name("data") / "train-00000.bin"
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)
    assert look(record) == (2, 1)


def test_another_index_makes_a_known_shard_unknown(record: Path) -> None:
    index = read_json(record.with_name("data") / INDEX)
    index["splits"]["train"]["shards"][0]["sha256"] = "0" * 64
    write_json(record.with_name("data") / INDEX, index)
    with pytest.raises(UserError, match=r"train-00000\.bin"):
        look(record)


@pytest.mark.parametrize("text", ["", "[1]", '{"train-00000.bin": 5, "train-00001.bin": {}}'])
def test_a_record_of_no_use_is_written_again(record: Path, text: str) -> None:
    record.write_text(text)
    assert look(record) == (2, 2)
    assert look(record) == (2, 0)


def test_without_a_record_all_are_hashed_each_time(record: Path) -> None:
    shards = TokenShards(record.with_name("data"), "validation")
    assert [verify_shards(shards).hashed for _ in range(2)] == [1, 1]
