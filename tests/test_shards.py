"""Token shards: whole or refused, every id as it was written, one end per document."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from shards_of import write_shards

from pipeline.errors import NotReadyError, UserError
from pipeline.lm.shards import INDEX, TokenShards, dtype_for, split_of


def tokenizer(vocab_size: int = 1000) -> Any:
    return SimpleNamespace(
        vocab_size=vocab_size, eos_id=1, fingerprint="f" * 64, path=Path("tokenizer.model"), is_exact=lambda: True
    )


def write(
    folder: Path, documents: list[list[int]], *, shard_tokens: int = 10, vocab_size: int = 1000
) -> dict[str, Any]:
    return write_shards(folder, documents, [[7, 8]], tokenizer(vocab_size), shard_tokens)


DOCUMENTS = [[2, 3, 4], [5] * 8, [6], [900, 901]]


def test_documents_come_back_each_with_one_end(tmp_path: Path) -> None:
    index = write(tmp_path, DOCUMENTS)
    shards = TokenShards(tmp_path, "train")
    assert [ids.tolist() for ids in shards] == [[2, 3, 4, 1, *[5] * 8, 1], [6, 1, 900, 901, 1]]
    assert (shards.documents, shards.tokens, shards.bytes) == (4, 18, 42)
    assert index["splits"]["train"]["longest_document"] == 24
    assert index["splits"]["train"]["bytes_per_token"] == round(42 / 18, 4)
    assert [(s["file"], s["documents"], s["tokens"]) for s in index["splits"]["train"]["shards"]] == [
        ("train-00000.bin", 2, 13),
        ("train-00001.bin", 2, 5),
    ]
    shards.verify()


def test_shards_of_an_interrupted_attempt_are_removed(tmp_path: Path) -> None:
    (tmp_path / "train-00009.bin").write_bytes(b"old")
    write(tmp_path, DOCUMENTS)
    assert sorted(path.name for path in tmp_path.glob("*.bin")) == [
        "train-00000.bin", "train-00001.bin", "validation-00000.bin",
    ]  # fmt: skip


# -- ids and their type -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(300, "uint16"), (65536, "uint16"), (65537, "uint32"), (70000, "uint32")]
)
def test_the_vocabulary_decides_the_type(vocab_size: int, dtype: str) -> None:
    assert dtype_for(vocab_size) == dtype


@pytest.mark.parametrize("vocab_size", [65536, 65537, 70001])
def test_the_highest_id_survives(tmp_path: Path, vocab_size: int) -> None:
    write(tmp_path, [[vocab_size - 1]], vocab_size=vocab_size)
    assert TokenShards(tmp_path, "train")[0].tolist() == [vocab_size - 1, 1]


@pytest.mark.parametrize("ids", [[70000], [1000], [-1]])
def test_an_id_outside_the_vocabulary_is_never_written(tmp_path: Path, ids: list[int]) -> None:
    with pytest.raises(ValueError, match="do not fit a vocabulary of 1000"):
        write(tmp_path, [ids])
    assert not list(tmp_path.glob("train*"))


def test_an_end_inside_a_document_is_never_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="read as the token 1"):
        write(tmp_path, [[2, 1, 3]])


# -- damaged data -----------------------------------------------------------------------------------------------------


def change_index(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize("content", [b"", b"abc", b"\0" * 24, b"\0" * 28])
def test_a_shard_of_another_size_is_named(tmp_path: Path, content: bytes) -> None:
    write(tmp_path, DOCUMENTS)
    (tmp_path / "train-00000.bin").write_bytes(content)
    with pytest.raises(UserError, match=rf"train-00000\.bin: .* has {len(content)} bytes, but 13 tokens .* are 26"):
        TokenShards(tmp_path, "train")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write(tmp_path, DOCUMENTS)
    (tmp_path / "train-00001.bin").unlink()
    with pytest.raises(UserError, match=r"train-00001\.bin: this token shard is in the index, but not on disk"):
        TokenShards(tmp_path, "train")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index.update(dtype="uint32"), r"train-00000\.bin: .* 26 bytes, but 13 tokens of uint32 are 52"),
        (lambda index: index.update(dtype="float32"), "dtype 'float32' is not one of uint16, uint32"),
        (lambda index: index.update(format=2), "format 2; this version reads format 1"),
        (lambda index: index["splits"].pop("train"), "no split 'train'; there are validation"),
        (lambda index: index.pop("tokenizer"), "not an index of token shards"),
    ],
)
def test_an_index_that_does_not_fit(tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str) -> None:
    write(tmp_path, DOCUMENTS)
    change_index(tmp_path, change)
    with pytest.raises(UserError, match=message):
        TokenShards(tmp_path, "train")


def test_no_index_is_not_ready_and_a_torn_one_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NotReadyError, match="no token shards here"):
        TokenShards(tmp_path, "train")
    (tmp_path / INDEX).write_text("{")
    with pytest.raises(UserError, match=r"index\.json: not readable"):
        TokenShards(tmp_path, "train")


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1000, 1], "token id 1000 is outside the vocabulary of 1000"),
        ([1, 1], "2 document ends, but 1 documents in the index"),
        ([3, 1], "the content is not what the index records"),
    ],
)
def test_verify_reads_the_content(tmp_path: Path, ids: list[int], message: str) -> None:
    write(tmp_path, [[2]])
    np.array(ids, "<u2").tofile(tmp_path / "train-00000.bin")
    with pytest.raises(UserError, match=rf"train-00000\.bin: {message}"):
        TokenShards(tmp_path, "train").verify()


def test_shards_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    write(tmp_path, DOCUMENTS)
    shards = TokenShards(tmp_path, "train")
    shards.check_tokenizer(tokenizer())
    other = tokenizer()
    other.fingerprint = "0" * 64
    with pytest.raises(UserError, match=r"made with another tokenizer \(ffffffffffff\) than .* \(000000000000\)"):
        shards.check_tokenizer(other)


# -- splits -----------------------------------------------------------------------------------------------------------


def test_the_split_is_by_the_hash() -> None:
    assert split_of(bytes(32), 0.01) == "validation"
    assert split_of(b"\xff" * 32, 0.99) == "train"
    assert split_of(bytes(32), 0.0) == "train"
    assert split_of(b"\xff" * 32, 1.0) == "validation"
