"""A checkpoint is whole or refused with its file and the reason; a trained Run never begins again by itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pipeline.config import Config
from pipeline.lm.checkpoint import (
    CheckpointError,
    load_checkpoint,
    load_weights,
    newest_whole,
    remove_old,
    save_checkpoint,
    verify,
)
from pipeline.lm.model import Transformer
from pipeline.lm.optim import build_optimizers
from pipeline.steps import list_steps

CONFIG = Config.model_validate(
    {
        "name": "x",
        "model": {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
        "pretrain": {"sequence_length": 16},
    }
)


def make(seed: int = 0):
    """Return a small model whose optimizers have made one step."""
    model = Transformer(CONFIG.model, 64, 16)
    model.init_weights(seed)
    optimizers = build_optimizers(model, CONFIG.pretrain)
    ids = torch.arange(16)[None] % 7
    model(ids, ids).backward()
    for optimizer in optimizers:
        optimizer.step()
    return model, optimizers


def save(folder: Path, step: int, seed: int = 0):
    model, optimizers = make(seed)
    save_checkpoint(folder, step, model, optimizers, {"step": step, "tokens": step * 10}, {"tokenizer": "abc"})
    return model, optimizers


def states(optimizers):
    return [value for o in optimizers for s in o.state.values() for value in s.values() if torch.is_tensor(value)]


def test_what_was_saved_is_what_is_loaded(tmp_path: Path) -> None:
    model, optimizers = save(tmp_path, 5)
    other, other_optimizers = make(seed=1)
    counters = load_checkpoint(tmp_path / "step-00000005", other, other_optimizers, ("step", "tokens"))
    assert counters == {"step": 5, "tokens": 50}
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(states(optimizers), states(other_optimizers), strict=True):
        assert torch.equal(a, b)


def test_optimizer_groups_keep_their_rates(tmp_path: Path) -> None:
    _, optimizers = save(tmp_path, 5)
    other, other_optimizers = make(seed=1)
    load_checkpoint(tmp_path / "step-00000005", other, other_optimizers, ("step",))
    for a, b in zip(optimizers, other_optimizers, strict=True):
        assert [{k: v for k, v in g.items() if k != "params"} for g in a.param_groups] == [
            {k: v for k, v in g.items() if k != "params"} for g in b.param_groups
        ]


def test_evaluation_loads_the_weights_alone(tmp_path: Path) -> None:
    model, _ = save(tmp_path, 5)
    other = Transformer(CONFIG.model, 64, 16)
    load_weights(tmp_path / "step-00000005", other)
    ids = torch.arange(16)[None]
    assert torch.equal(model(ids), other(ids))


def test_names_have_no_wrapper_in_them(tmp_path: Path) -> None:
    save(tmp_path, 5)
    metadata = torch.distributed.checkpoint.FileSystemReader(tmp_path / "step-00000005").read_metadata()
    names = metadata.state_dict_metadata
    assert "model.model.embed_tokens.weight" in names
    assert not any("_orig_mod" in name or ".module." in name for name in names)


def first_data_file(folder: Path) -> Path:
    return next(folder.glob("*.distcp"))


def cut(folder: Path) -> None:
    path = first_data_file(folder)
    path.write_bytes(path.read_bytes()[:-1])


def flip(folder: Path) -> None:
    path = first_data_file(folder)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def edit_manifest(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"step": 7}))


DAMAGES = {
    "one byte cut": (cut, "bytes, written were"),
    "one bit flipped": (flip, "sha256"),
    "file removed": (lambda folder: first_data_file(folder).unlink(), "missing"),
    "file emptied": (lambda folder: first_data_file(folder).write_bytes(b""), "0 bytes"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "no manifest"),
    "manifest of another step": (edit_manifest, "belongs to step 7"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_and_the_older_one_used(tmp_path: Path, damage: str) -> None:
    save(tmp_path, 5)
    save(tmp_path, 10)
    do, reason = DAMAGES[damage]
    do(tmp_path / "step-00000010")
    with pytest.raises(CheckpointError, match=reason):
        verify(tmp_path / "step-00000010")
    chosen, refused = newest_whole(tmp_path)
    assert chosen == tmp_path / "step-00000005"
    assert len(refused) == 1


def test_none_whole_is_an_error_and_not_a_fresh_start(tmp_path: Path) -> None:
    save(tmp_path, 5)
    cut(tmp_path / "step-00000005")
    with pytest.raises(CheckpointError, match="none of the checkpoints is whole"):
        newest_whole(tmp_path)


def test_steps_are_ordered_as_numbers_and_strangers_ignored(tmp_path: Path) -> None:
    for step in (900, 1000, 123456789):
        save(tmp_path, step)
    (tmp_path / "step-x").mkdir()
    (tmp_path / ".step-00002000.tmp").mkdir()
    (tmp_path / "step-00003000").write_text("a file")
    assert list_steps(tmp_path) == [900, 1000, 123456789]
    assert newest_whole(tmp_path)[0] == tmp_path / "step-123456789"


def test_empty_folder_is_a_fresh_start(tmp_path: Path) -> None:
    assert newest_whole(tmp_path / "checkpoints") == (None, [])


def test_retention_keeps_the_newest_and_the_pinned(tmp_path: Path) -> None:
    for step in (0, 5, 10, 15):
        save(tmp_path, step)
    assert remove_old(tmp_path, 2, pinned={0}) == [5]
    assert list_steps(tmp_path) == [0, 10, 15]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000000", "step-00000010", "step-00000015"]


def test_the_leftover_of_a_killed_save_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / ".step-00000005.tmp").mkdir(parents=True)
    (tmp_path / ".step-00000005.tmp" / "__0_0.distcp").write_text("half")
    save(tmp_path, 5)
    assert verify(tmp_path / "step-00000005")["step"] == 5
    assert not list(tmp_path.glob(".step*"))
