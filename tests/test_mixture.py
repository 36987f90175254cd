"""A mixture: each source has its share, every window of it comes once per epoch, and any place is found by itself."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shards_of import write_piece

from pipeline.config.schema import Config
from pipeline.errors import UserError
from pipeline.lm.batches import Batches
from pipeline.lm.indexing import write_data
from pipeline.lm.mixture import BLOCK, MixedBatches, Mixture, make_batches, share_out
from pipeline.lm.shards import TokenShards

T = 4
TOKENIZER = SimpleNamespace(vocab_size=1000, eos_id=1, fingerprint="f" * 64, is_exact=lambda: True)


@pytest.fixture
def shards(tmp_path: Path) -> TokenShards:
    """Two sources: 40 windows of ids below 500 in two shards, 10 windows of ids from 500 on."""
    texts = [list(range(2, 82)), list(range(100, 182)), list(range(500, 541))]
    outputs = [
        write_piece(tmp_path / "pieces" / str(number), {"train": [ids]}, TOKENIZER) for number, ids in enumerate(texts)
    ]
    write_data(tmp_path, "", TOKENIZER, outputs, [0, 0, 1], made_from="x", shard_tokens=50)
    return TokenShards(tmp_path, "train")


def test_each_source_has_its_share_and_is_gone_through_whole(shards: TokenShards) -> None:
    batches = MixedBatches(shards, T, 10, 1, [1, 3])
    rows = np.concatenate([batches.batch(step) for step in range(100)])
    second = rows[rows[:, 0] >= 500][:, 0]
    assert len(second) == 750  # of BLOCK sequences
    for start in range(0, 740, 10):
        assert len(set(second[start : start + 10].tolist())) == 10  # an epoch
    assert second[:10].tolist() != second[10:20].tolist()
    first = rows[rows[:, 0] < 500][:, 0]
    assert sorted(first[:40].tolist()) == sorted(set(first.tolist()))
    assert batches.epoch(100) == 75.0


def test_a_batch_does_not_depend_on_those_before_it_nor_on_the_ranks(shards: TokenShards) -> None:
    whole = [MixedBatches(shards, T, 8, 5, [2, 1]).batch(step) for step in (0, 300, 124, 125, 126)]
    batches = MixedBatches(shards, T, 8, 5, [2, 1])
    for step, wanted in zip((0, 300, 124, 125, 126), whole, strict=True):
        parts = [batches.batch(step, rank, 4) for rank in range(4)]
        assert np.array_equal(np.concatenate(parts), wanted)


@given(
    weights=st.lists(st.floats(0.001, 1000), min_size=1, max_size=12), start=st.integers(0, 3 * BLOCK),
    seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_places_count_up_in_each_source(weights: list[float], start: int, seed: int) -> None:
    mixture = Mixture(weights, seed)
    before, _ = mixture.places(np.arange(start))
    sources, places = mixture.places(np.arange(start, start + 50))
    for source, place in zip(sources.tolist(), places.tolist(), strict=True):
        assert place == np.count_nonzero(before == source)
        before = np.append(before, source)


@pytest.mark.parametrize(
    ("weights", "counts"),
    [([1, 1], [500, 500]), ([1, 2], [333, 667]), ([1, 1e6], [1, 999]), ([1], [1000]), ([1e-9, 1e-9, 1], [1, 1, 998])],
)
def test_shares_are_whole_and_none_is_left_out(weights: list[float], counts: list[int]) -> None:
    assert share_out(weights, 1000).tolist() == counts


def test_the_config_decides(shards: TokenShards) -> None:
    def config(*weights: float | None) -> Config:
        data = [{"path": f"{number}.txt", "weight": weight} for number, weight in enumerate(weights)]
        return Config.model_validate({"name": "x", "data": data, "pretrain": {"sequence_length": T}})

    assert type(make_batches(shards, config(None, None))) is Batches
    assert isinstance(make_batches(shards, config(0.2, 0.8)), MixedBatches)
    with pytest.raises(UserError, match="item 3 of data: has no window of pretrain.sequence_length 4"):
        make_batches(shards, config(1, 1, 1))
