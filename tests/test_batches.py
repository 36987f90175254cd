"""Batches: a pure function of (seed, step), the same at any number of ranks, every token once per epoch."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pytest
from shards_of import write_shards
from test_shards import write

from pipeline.errors import UserError
from pipeline.lm import batches as module
from pipeline.lm.batches import Batches, validation_text
from pipeline.lm.shards import TokenShards
from pipeline.lm.tokenizer import Tokenizer, train_tokenizer

T = 4


@pytest.fixture
def shards(tmp_path: Path) -> TokenShards:
    """Three shards of 31, 31 and 11 tokens, all different save the ends: 7 + 7 + 2 windows."""
    write(tmp_path, [list(range(2, 32)), list(range(40, 70)), list(range(80, 90))], shard_tokens=31)
    return TokenShards(tmp_path, "train")


def test_inputs_and_targets_are_the_text_one_apart(shards: TokenShards) -> None:
    batch = Batches(shards, T, 4, seed=1).batch(0)
    assert batch.shape == (4, T + 1)
    assert batch.dtype == np.int64
    text = np.concatenate(list(shards)).tolist()
    for row in batch.tolist():
        start = text.index(row[0])
        assert text[start : start + T + 1] == row


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_global_batch_is_the_same_at_any_world_size(shards: TokenShards, world_size: int) -> None:
    whole = Batches(shards, T, 4, seed=3)
    for step in (0, 3, 4, 1, 1000):  # in any order, and as new objects: there is no state
        parts = [Batches(shards, T, 4, seed=3).batch(step, rank, world_size) for rank in range(world_size)]
        np.testing.assert_array_equal(np.concatenate(parts), whole.batch(step))


def test_every_window_comes_once_per_epoch_in_another_order(shards: TokenShards) -> None:
    batches = Batches(shards, T, 4, seed=1)
    assert batches.num_windows == 16
    epochs = [np.concatenate([batches.sample_ids(4 * epoch + step) for step in range(4)]) for epoch in range(3)]
    assert all(sorted(order) == list(range(16)) for order in epochs)
    assert len({tuple(order) for order in epochs}) == 3


def test_every_token_is_predicted_once_per_epoch(shards: TokenShards) -> None:
    batches = Batches(shards, T, 4, seed=1)
    predicted = np.concatenate([batches.batch(step)[:, 1:].ravel() for step in range(4)])
    wanted = np.concatenate([ids[1 : 1 + (len(ids) - 1) // T * T] for ids in shards])
    np.testing.assert_array_equal(np.sort(predicted), np.sort(wanted))


def test_windows_of_one_shard_are_those_of_many(tmp_path: Path, shards: TokenShards) -> None:
    ids = [shard.tolist() for shard in shards]
    for number, tokens in enumerate(ids):
        folder = tmp_path / str(number)
        write(folder, [tokens[:-1]], shard_tokens=1000)
        alone = Batches(TokenShards(folder, "train"), T, 4, seed=1)
        wanted = [tokens[start : start + T + 1] for start in range(0, len(tokens) - T, T)]
        assert alone.windows(np.arange(alone.num_windows)).tolist() == wanted
    together = Batches(shards, T, 4, seed=1)
    wanted = [tokens[start : start + T + 1] for tokens in ids for start in range(0, len(tokens) - T, T)]
    assert together.windows(np.arange(together.num_windows)).tolist() == wanted


def test_no_more_shards_are_open_than_the_process_may_have(
    shards: TokenShards, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_shards() -> int:
        return sum(link.readlink().suffix == ".bin" for link in Path("/proc/self/fd").iterdir() if link.is_symlink())

    every = Batches(shards, T, 16, seed=1)
    wanted = every.batch(0)
    assert open_shards() == 3
    del every
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(module, "FILES_BESIDE", hard - 1)
    try:
        np.testing.assert_array_equal(Batches(shards, T, 16, seed=1).batch(0), wanted)
        few = Batches(shards, T, 16, seed=1)
        few.batch(0)
        assert open_shards() == 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_epoch_that_does_not_divide_goes_on_in_the_next(shards: TokenShards) -> None:
    batches = Batches(shards, T, 6, seed=1)
    stream = np.concatenate([batches.sample_ids(step) for step in range(8)])  # 48 = three epochs of 16
    for epoch in stream.reshape(3, 16):
        assert sorted(epoch) == list(range(16))


def test_a_batch_larger_than_the_data_repeats_it(shards: TokenShards) -> None:
    samples = Batches(shards, T, 40, seed=1).sample_ids(0)
    assert sorted(samples[:16]) == sorted(samples[16:32]) == list(range(16))
    assert Batches(shards, T, 40, seed=1).epoch(2) == 5.0


def test_the_seed_decides_the_order(shards: TokenShards) -> None:
    one, two = Batches(shards, T, 16, seed=1), Batches(shards, T, 16, seed=2)
    assert one.sample_ids(0).tolist() != two.sample_ids(0).tolist()


def test_the_order_is_the_one_that_runs_depend_on(shards: TokenShards) -> None:
    """A change here means that no Run resumes with the batches it began with."""
    assert Batches(shards, T, 16, seed=1).sample_ids(0).tolist() == GOLDEN


GOLDEN = [1, 12, 7, 10, 14, 4, 5, 8, 0, 9, 2, 13, 11, 6, 3, 15]


def test_a_batch_that_ranks_cannot_share(shards: TokenShards) -> None:
    with pytest.raises(UserError, match="global_batch_size 4 can't be shared by 3 ranks"):
        Batches(shards, T, 4, seed=1).batch(0, 0, 3)


@pytest.mark.parametrize("documents", [[list(range(2, 12))], []])
def test_too_little_data_is_an_error_with_numbers(tmp_path: Path, documents: list[list[int]]) -> None:
    write(tmp_path, documents, shard_tokens=100)
    tokens = sum(len(ids) + 1 for ids in documents)
    with pytest.raises(UserError, match=rf"has {tokens} tokens in .*sequence_length 64 needs 65"):
        Batches(TokenShards(tmp_path, "train"), 64, 4, seed=1)


def test_one_window_is_enough(tmp_path: Path) -> None:
    write(tmp_path, [[2, 3, 4, 5]], shard_tokens=100)
    assert Batches(TokenShards(tmp_path, "train"), T, 2, seed=1).batch(7).tolist() == [[2, 3, 4, 5, 1]] * 2


def test_validation_text_counts_the_bytes_of_the_original(tmp_path: Path) -> None:
    from test_tokenizer import config, corpus

    train_tokenizer(corpus(), config(), tmp_path / "m")
    tokenizer = Tokenizer(tmp_path / "m")
    documents = [b" a </s>b\n", "ü ▁".encode()]
    ids = [ids.tolist() for ids in tokenizer.encode_documents(documents, 1)]
    write_shards(tmp_path, ids, ids, tokenizer, text_bytes=2 * list(map(len, documents)))
    text = validation_text(TokenShards(tmp_path, "validation"), tokenizer)
    assert text.bytes == sum(map(len, documents))
    assert text.text == b"".join(documents).replace("▁".encode(), b" ")
    assert np.count_nonzero(text.ids == tokenizer.eos_id) == 2
    train_tokenizer(corpus(seed=1), config(), tmp_path / "other")
    other = Tokenizer(tmp_path / "other")
    with pytest.raises(UserError, match="another tokenizer"):
        validation_text(TokenShards(tmp_path, "validation"), other)
    ids = [ids.tolist() for ids in other.encode_documents(documents, 1)]
    write_shards(tmp_path / "shards", ids, ids, other, text_bytes=2 * list(map(len, documents)))
    again = validation_text(TokenShards(tmp_path / "shards", "validation"), other)
    assert (again.sha256, again.bytes) == (text.sha256, text.bytes)
