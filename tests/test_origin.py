"""What has changed between two attempts is told, or refused where training would not be the same any more."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_shards import DOCUMENTS, write

from pipeline.config.schema import Config
from pipeline.errors import UserError
from pipeline.lm.origin import changes, check_tokenizer, origin
from pipeline.lm.shards import TokenShards

CHECKPOINT = Path("step-00000005")


@pytest.fixture
def shards(tmp_path: Path) -> TokenShards:
    write(tmp_path, DOCUMENTS)
    return TokenShards(tmp_path, "train")


def config(**keys: object) -> Config:
    return Config.model_validate({"name": "x"} | keys)


def test_nothing_has_changed(shards: TokenShards) -> None:
    then = origin(config(), shards)
    assert changes(CHECKPOINT, then, origin(config(name="y", evaluate={"batch_size": 2}), shards)) == []
    assert changes(CHECKPOINT, {}, then) == []  # of a version that did not say


def test_each_changed_key_is_told(shards: TokenShards) -> None:
    now = config(seed=2, pretrain={"learning_rate": 0.5, "srun": {"exact": True}})
    assert changes(CHECKPOINT, origin(config(), shards), origin(now, shards)) == [
        "seed: 1 -> 2",
        "pretrain.learning_rate: 0.003 -> 0.5",
        'pretrain.srun.exact: null -> "true"',
    ]


def test_other_tokens_or_another_tokenizer_are_refused(shards: TokenShards, tmp_path: Path) -> None:
    now = origin(config(), shards)
    write(tmp_path / "other", [[7, 7], *DOCUMENTS])
    then = origin(config(), TokenShards(tmp_path / "other", "train"))
    with pytest.raises(UserError, match="trained with other token shards"):
        changes(CHECKPOINT, then, now)
    with pytest.raises(UserError, match="trained with another tokenizer"):
        changes(CHECKPOINT, now | {"tokenizer": "e" * 64}, now)
    with pytest.raises(UserError, match="trained with another tokenizer"):
        check_tokenizer(CHECKPOINT, now, "e" * 64)
