"""A checkpoint is whole or refused with its file and the reason; a trained Run never begins again by itself."""

from __future__ import annotations

import errno
import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from conftest import PROJECT, environment

from pipeline.config.schema import Config
from pipeline.errors import DivergedError, NotReadyError, StorageError
from pipeline.lm import saver as saver_module
from pipeline.lm import staging, storage
from pipeline.lm.checkpoint import CheckpointError, load_checkpoint, load_newest, load_weights, remove_old, verify
from pipeline.lm.contents import seal
from pipeline.lm.model import Transformer
from pipeline.lm.optim import build_optimizers
from pipeline.lm.saver import Hooks, Saver
from pipeline.run.steps import list_steps

CONFIG = Config.model_validate(
    {
        "name": "x",
        "model": {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
        "pretrain": {"sequence_length": 16},
    }
)


def make(seed: int = 0, vocabulary: int = 64):
    """Return a small model whose optimizers have made one step."""
    model = Transformer(CONFIG.model, vocabulary, 16)
    model.init_weights(seed)
    optimizers = build_optimizers(model, CONFIG.pretrain)
    ids = torch.arange(16)[None] % 7
    model(ids, ids).backward()
    for optimizer in optimizers:
        optimizer.step()
    return model, optimizers


def save(folder: Path, *steps: int, seed: int = 0):
    model, optimizers = make(seed)
    with Saver(folder, {"tokenizer": "abc"}) as saver:
        for step in steps:
            saver.save(step, model, optimizers, {"step": step, "tokens": step * 10})
    return model, optimizers


def states(optimizers):
    return [value for o in optimizers for s in o.state.values() for value in s.values() if torch.is_tensor(value)]


def assert_equal(one, other) -> None:
    for a, b in zip(one[0].parameters(), other[0].parameters(), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(states(one[1]), states(other[1]), strict=True):
        assert torch.equal(a, b)


# What is saved is what is loaded


def test_what_was_saved_is_what_is_loaded(tmp_path: Path) -> None:
    saved, other = save(tmp_path, 5), make(seed=1)
    assert load_checkpoint(tmp_path / "step-00000005", *other).progress == {"step": 5, "tokens": 50}
    assert_equal(saved, other)


def test_training_may_go_on_while_it_is_written(tmp_path: Path) -> None:
    model, optimizers = make()
    before = [p.detach().clone() for p in model.parameters()]
    gate = threading.Event()
    with Saver(tmp_path, {}, Hooks(before_publish=gate.wait)) as saver:
        saver.save(5, model, optimizers, {"step": 5})
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        assert list_steps(tmp_path) == []
        gate.set()
    other, other_optimizers = make(seed=1)
    load_checkpoint(tmp_path / "step-00000005", other, other_optimizers)
    for a, b in zip(before, other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_same_state_makes_the_same_files_whatever_the_buffer_held(tmp_path: Path) -> None:
    save(tmp_path / "a", 5)
    with Saver(tmp_path / "b", {}) as saver:
        saver.reserve(2**20)
        saver.wait()
        saver.stager.buffer.tensor.fill_(255)
        saver.save(5, *make(), {"step": 5, "tokens": 50})
    for name in ("rank-00000.bin", "tensors.json"):
        a, b = (tmp_path / folder / "step-00000005" / name for folder in "ab")
        assert a.read_bytes() == b.read_bytes()


def test_a_save_is_planned_again_when_the_state_has_another_structure(tmp_path: Path, monkeypatch) -> None:
    plans, plan = [], storage._plan
    monkeypatch.setattr(storage, "_plan", lambda tensors: plans.append(1) or plan(tensors))
    first, second = make(), make(seed=1, vocabulary=80)
    with Saver(tmp_path, {}) as saver:
        for step, state in enumerate([first, first, second, second]):
            saver.save(step, *state, {"step": step})
            saver.wait()
    assert len(plans) == 2
    for step, (saved, vocabulary) in enumerate([(first, 64), (first, 64), (second, 80), (second, 80)]):
        other = make(seed=2, vocabulary=vocabulary)
        load_checkpoint(tmp_path / f"step-{step:08d}", *other)
        assert_equal(saved, other)


def test_optimizer_groups_keep_their_rates(tmp_path: Path) -> None:
    _, optimizers = save(tmp_path, 5)
    other, other_optimizers = make(seed=1)
    for optimizer in other_optimizers:
        for group in optimizer.param_groups:
            group["lr"] = 7.0
    load_checkpoint(tmp_path / "step-00000005", other, other_optimizers)
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


def test_evaluation_does_not_import_what_training_needs() -> None:
    code = "import sys, pipeline.lm.checkpoint; print(*[m for m in ('torch._dynamo', 'torch.distributed.checkpoint') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PROJECT, check=True)
    assert result.stdout.strip() == ""


def stored_names(checkpoint: Path) -> dict[str, dict]:
    return json.loads((checkpoint / "tensors.json").read_text())["tensors"]


def test_names_have_no_wrapper_in_them(tmp_path: Path) -> None:
    model, optimizers = make()
    with Saver(tmp_path, {}) as saver:
        saver.save(5, torch.compile(model), optimizers, {})
    names = stored_names(tmp_path / "step-00000005")
    assert "model.model.embed_tokens.weight" in names
    assert not any("_orig_mod" in name or ".module." in name for name in names)
    load_weights(tmp_path / "step-00000005", torch.compile(Transformer(CONFIG.model, 64, 16)))


def test_tensors_without_elements_or_dimensions_and_every_format(tmp_path: Path) -> None:
    class Odd(torch.nn.Module):
        def __init__(self, fill: float) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.full((3, 5), fill))
            self.register_buffer("empty", torch.zeros(0, 4))
            self.register_buffer("scalar", torch.tensor(fill, dtype=torch.bfloat16))
            self.register_buffer("flags", torch.tensor([fill > 0, False]))
            self.register_buffer("transposed", torch.arange(12.0).view(3, 4).T * fill)

    saved, other = Odd(3.0), Odd(0.0)
    with Saver(tmp_path, {}) as saver:
        saver.save(1, saved, [torch.optim.SGD(saved.parameters())], {})
    load_weights(tmp_path / "step-00000001", other)
    for name, tensor in saved.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


# Damage


def data_file(folder: Path) -> Path:
    return next(folder.glob("*.bin"))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path, at: float = 0.5) -> None:
    content = bytearray(path.read_bytes())
    content[int(len(content) * at)] ^= 1
    path.write_bytes(content)


def edit_manifest(folder: Path, **changes) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | changes))


def swap(folder: Path) -> None:
    other = folder.parent / "step-00000005"
    shutil.copy(data_file(other), data_file(folder))


DAMAGES = {
    "one byte cut": (lambda folder: cut(data_file(folder)), "bytes, written were"),
    "one bit flipped": (lambda folder: flip(data_file(folder)), "rank-00000.bin: its sha256"),
    "last bit flipped": (lambda folder: flip(data_file(folder), 0.9999), "rank-00000.bin: its sha256"),
    "names flipped": (lambda folder: flip(folder / "tensors.json"), "tensors.json: its sha256"),
    "file removed": (lambda folder: data_file(folder).unlink(), "missing"),
    "file emptied": (lambda folder: data_file(folder).write_bytes(b""), "0 bytes"),
    "file of another step": (swap, "rank-00000.bin: its sha256"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "no manifest"),
    "manifest emptied": (lambda folder: (folder / "manifest.json").write_bytes(b""), "not a manifest"),
    "manifest is a list": (lambda folder: (folder / "manifest.json").write_text("[1]"), "not a manifest"),
    "manifest of another step": (lambda folder: edit_manifest(folder, step=7), "belongs to step 7"),
    "manifest edited": (lambda folder: edit_manifest(folder, tokenizer="x"), "manifest.json: its sha256"),
    "another format": (lambda folder: edit_manifest(folder, format=1), "format 1, this version reads format 2"),
    "manifest is a folder": (lambda f: ((f / "manifest.json").unlink(), (f / "manifest.json").mkdir()), "no manifest"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_and_the_older_one_used(tmp_path: Path, damage: str) -> None:
    saved = save(tmp_path, 5)
    save(tmp_path, 10, seed=1)
    do, reason = DAMAGES[damage]
    do(tmp_path / "step-00000010")
    with pytest.raises(CheckpointError, match=reason):
        verify(tmp_path / "step-00000010")
    other = make(seed=2)
    loaded = load_newest(tmp_path, *other)
    assert loaded is not None
    assert (loaded.path, loaded.progress["step"], len(loaded.refused)) == (tmp_path / "step-00000005", 5, 1)
    assert_equal(saved, other)
    assert (tmp_path / "step-00000010").is_dir()


def test_no_bit_of_the_small_files_can_change_what_is_loaded(tmp_path: Path) -> None:
    saved = save(tmp_path, 5)
    checkpoint, other = tmp_path / "step-00000005", make(seed=1)
    for name in ("manifest.json", "tensors.json"):
        content = (checkpoint / name).read_bytes()
        for at in range(0, len(content), max(1, len(content) // 60)):
            (checkpoint / name).write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
            try:
                progress = load_checkpoint(checkpoint, *other).progress
            except CheckpointError:
                continue
            assert progress == {"step": 5, "tokens": 50}  # a blank of the JSON was hit
            assert_equal(saved, other)
        (checkpoint / name).write_bytes(content)


def test_none_whole_is_an_error_and_not_a_fresh_start(tmp_path: Path) -> None:
    save(tmp_path, 5)
    cut(data_file(tmp_path / "step-00000005"))
    with pytest.raises(CheckpointError, match="none of the checkpoints is whole"):
        load_newest(tmp_path, *make())


def test_steps_are_ordered_as_numbers_and_strangers_ignored(tmp_path: Path) -> None:
    save(tmp_path, 900, 1000, 123456789)
    (tmp_path / "step-x").mkdir()
    (tmp_path / ".step-00002000.tmp").mkdir()
    (tmp_path / "step-00003000").write_text("a file")
    assert list_steps(tmp_path) == [900, 1000, 123456789]
    loaded = load_newest(tmp_path, *make())
    assert loaded is not None
    assert loaded.path == tmp_path / "step-123456789"


def test_empty_folder_is_a_fresh_start(tmp_path: Path) -> None:
    assert load_newest(tmp_path / "checkpoints", *make()) is None


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", ["rank-00000.bin", "tensors.json", "manifest.json", ".metadata"])
def test_a_malicious_pickle_has_no_effect(tmp_path: Path, name: str) -> None:
    save(tmp_path, 5)
    checkpoint = tmp_path / "step-00000005"
    (checkpoint / name).write_bytes(pickle.dumps(Malicious(tmp_path / "harm")))
    try:
        load_checkpoint(checkpoint, *make())
    except CheckpointError:
        assert name != ".metadata"
    assert not (tmp_path / "harm").exists()


def reseal(checkpoint: Path, change) -> None:
    """Forge tensors.json and all hashes, as somebody with ill will could."""
    import hashlib

    record = json.loads((checkpoint / "tensors.json").read_text())
    change(record["tensors"]["model.model.norm.weight"])
    text = json.dumps(record).encode()
    (checkpoint / "tensors.json").write_bytes(text)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"]["tensors.json"] = {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
    (checkpoint / "manifest.json").write_text(json.dumps(seal(manifest)))


FORGERIES = {
    "outside the file": lambda tensor: tensor["chunks"][0].update(byte=10**9),
    "negative": lambda tensor: tensor["chunks"][0].update(byte=-64),
    "outside the tensor": lambda tensor: tensor["chunks"][0].update(offsets=[1]),
    "another file": lambda tensor: tensor["chunks"][0].update(file="../../secret"),
    "unknown format": lambda tensor: tensor.update(dtype="object"),
    "a part is missing": lambda tensor: tensor["chunks"][0].update(sizes=[3]),
    "no parts": lambda tensor: tensor.update(chunks=[]),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_places_outside_a_file_are_refused(tmp_path: Path, forgery: str) -> None:
    save(tmp_path, 5)
    reseal(tmp_path / "step-00000005", FORGERIES[forgery])
    with pytest.raises(CheckpointError):
        load_weights(tmp_path / "step-00000005", Transformer(CONFIG.model, 64, 16))


# Another model


def test_missing_and_unexpected_names_are_told(tmp_path: Path) -> None:
    model, _ = make()
    del model.model.layers[1]
    with Saver(tmp_path, {}) as saver:
        saver.save(5, model, build_optimizers(model, CONFIG.pretrain), {})
    with pytest.raises(CheckpointError, match=r"missing: model\.model\.layers\.1\.") as caught:
        load_weights(tmp_path / "step-00000005", Transformer(CONFIG.model, 64, 16))
    assert str(caught.value).count("layers.1.") <= 10
    save(tmp_path, 10)
    with pytest.raises(CheckpointError, match=r"unexpected: model\.model\.layers\.1\."):
        load_weights(tmp_path / "step-00000010", model)


def test_shape_and_dtype_are_compared(tmp_path: Path) -> None:
    save(tmp_path, 5)
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight has shape \[64, 16\], the model has \[80, 16\]"):
        load_newest(tmp_path, *make(vocabulary=80))  # not a damage: no older one is tried
    with pytest.raises(CheckpointError, match=r"is torch.float32, the model has torch.bfloat16"):
        load_weights(tmp_path / "step-00000005", Transformer(CONFIG.model, 64, 16).bfloat16())


# Failing saves


def test_what_is_not_finite_is_never_saved(tmp_path: Path) -> None:
    saver = Saver(tmp_path, {})
    model, optimizers = make()
    saver.save(5, model, optimizers, {})
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
    saver.save(10, model, optimizers, {})
    with pytest.raises(DivergedError, match=r"not finite: model\.model\.norm\.weight"):
        saver.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]


def poll_until_it_raises(saver: Saver) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        saver.poll()
        time.sleep(0.01)


def failing(number: int):
    def write(path: Path, content: memoryview) -> None:
        path.write_bytes(content[:100])
        raise OSError(number, os.strerror(number))

    return write


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
def test_a_failed_write_surfaces_at_the_next_step_and_leaves_nothing(tmp_path: Path, monkeypatch, number: int) -> None:
    save(tmp_path, 5)
    monkeypatch.setattr(saver_module, "write_durably", failing(number))
    saver = Saver(tmp_path, {})
    saver.save(10, *make(), {})
    with pytest.raises(StorageError, match=os.strerror(number)):
        poll_until_it_raises(saver)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]
    monkeypatch.undo()
    saver.save(10, *make(), {})  # the failure was told; the next save is a new one
    saver.wait()
    assert list_steps(tmp_path) == [5, 10]


def raise_after(done: None, error: type[Exception]) -> None:
    raise error


def test_a_failure_surfaces_at_the_next_save_and_at_the_end(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(saver_module, "write_durably", failing(errno.ENOSPC))
    saver = Saver(tmp_path, {})
    saver.save(5, *make(), {})
    with pytest.raises(StorageError):
        saver.save(10, *make(), {})
    with pytest.raises(StorageError), Saver(tmp_path, {}) as other:
        other.save(5, *make(), {})
    with pytest.raises(KeyError), Saver(tmp_path, {}) as other:  # the first error is the one to see
        raise_after(other.save(5, *make(), {}), KeyError)


def test_a_file_size_limit_is_a_storage_error(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    saver = Saver(tmp_path, {})
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        saver.save(5, *make(), {})
        with pytest.raises(StorageError, match="File too large"):
            saver.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_free_space_is_checked_first(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(saver_module, "MARGIN", 10**18)
    saver = Saver(tmp_path, {})
    saver.save(5, *make(), {})
    with pytest.raises(StorageError, match=rf"{tmp_path}: a checkpoint needs .* MB are free"):
        saver.wait()
    assert list(tmp_path.iterdir()) == []


def test_a_hanging_disk_surfaces(tmp_path: Path, monkeypatch) -> None:
    gate = threading.Event()
    monkeypatch.setattr(saver_module, "write_durably", lambda path, content: gate.wait())
    saver = Saver(tmp_path, {}, limit=0.2)
    saver.save(5, *make(), {})
    with pytest.raises(StorageError, match="save of step 5 hangs"):
        poll_until_it_raises(saver)
    gate.set()


def test_a_folder_that_is_gone_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    saver = Saver(tmp_path / "checkpoints", {})
    saver.save(5, *make(), {})
    with pytest.raises(StorageError, match="a save failed"):
        saver.wait()


def test_a_folder_that_is_moved_away_between_saves_is_not_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    saver = Saver(folder, {})
    saver.save(5, *make(), {})
    saver.wait()
    folder.rename(tmp_path / "aside")
    saver.save(10, *make(), {})
    with pytest.raises(StorageError, match="it is gone, with the checkpoints in it"):
        saver.wait()
    assert not folder.exists()


def test_who_may_no_longer_write_does_not_rename(tmp_path: Path) -> None:
    def refuse() -> None:
        raise StorageError("another process owns this Run")

    saver = Saver(tmp_path, {}, Hooks(before_publish=refuse))
    saver.save(5, *make(), {})
    with pytest.raises(StorageError, match="another process"):
        saver.wait()
    assert list(tmp_path.iterdir()) == []


def test_without_direct_io_the_page_cache_serves(tmp_path: Path, monkeypatch) -> None:
    real, refused = os.open, []

    def no_direct(path, flags, *rest, **more):
        if flags & os.O_DIRECT:
            refused.append(path)
            raise OSError(errno.EINVAL, "no direct I/O here")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(staging.os, "open", no_direct)
    saved, other = save(tmp_path, 5), make(seed=1)
    assert len(refused) == 1
    load_checkpoint(tmp_path / "step-00000005", *other)
    assert_equal(saved, other)


# Retention


def test_retention_keeps_the_first_the_newest_the_nth_and_the_pinned(tmp_path: Path) -> None:
    save(tmp_path, 0, 5, 10, 15, 20, 25, 30)
    (tmp_path / "step-00000015" / "pinned").touch()
    assert remove_old(tmp_path, 2, keep_every=10) == [5]
    assert remove_old(tmp_path, 1) == [10, 20, 25]
    assert list_steps(tmp_path) == [0, 15, 30]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000000", "step-00000015", "step-00000030"]
    assert load_newest(tmp_path, *make()).path.name == "step-00000030"


def test_nothing_goes_for_a_successor_that_is_not_whole(tmp_path: Path) -> None:
    save(tmp_path, 0, 5, 10)
    cut(data_file(tmp_path / "step-00000010"))
    assert remove_old(tmp_path, 1) == []
    assert list_steps(tmp_path) == [0, 5, 10]


def test_a_reader_of_a_removed_checkpoint_is_told(tmp_path: Path) -> None:
    save(tmp_path, 0, 5, 10)
    remove_old(tmp_path, 1)
    with pytest.raises(NotReadyError, match="step-00000005: this checkpoint is gone"):
        load_weights(tmp_path / "step-00000005", Transformer(CONFIG.model, 64, 16))


def test_the_leftover_of_a_killed_save_is_no_obstacle(tmp_path: Path) -> None:
    for name in (".step-00000005.0123abcd.tmp", ".step-00000004.old"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "rank-00000.bin").write_text("half")
    save(tmp_path, 5)
    assert verify(tmp_path / "step-00000005")["step"] == 5
    assert not list(tmp_path.glob(".step*"))


def test_a_refused_step_can_be_saved_again(tmp_path: Path) -> None:
    save(tmp_path, 5)
    cut(data_file(tmp_path / "step-00000005"))
    save(tmp_path, 5)
    verify(tmp_path / "step-00000005")
    assert not list(tmp_path.glob(".step*"))


def test_a_save_killed_at_any_operation_is_no_obstacle() -> None:
    """The short form of `nox -s faults`: every sixth operation of a save and every sixth bit."""
    script = PROJECT / "tests" / "faults" / "kill_save.py"
    result = subprocess.run(
        [sys.executable, str(script), "--every", "6"], capture_output=True, text=True, env=environment(), timeout=120
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "PASSED" in result.stdout
