"""One rank of tests/test_checkpoint_ranks.py: `ranks.py STORE RANK WORLD_SIZE FOLDER`; raises where something is not as it should be."""

from __future__ import annotations

import errno
import io
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from parallel_ranks import begins_alike, train_alike
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from pipeline.errors import StorageError
from pipeline.lm import saver as saver_module
from pipeline.lm.checkpoint import load_newest
from pipeline.lm.saver import Saver


def make(*, fill: bool, sharded: bool = False):
    """Return a model and its optimizer; filled, all their numbers follow from the parameters' names."""
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 1, bias=False))
    if sharded:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    with torch.no_grad():
        for number, (_, parameter) in enumerate(model.named_parameters(), start=1):
            state = optimizer.state[parameter]
            for place, tensor in enumerate((parameter, state["exp_avg"], state["exp_avg_sq"]), start=1):
                whole = torch.arange(parameter.numel()).view(parameter.shape) * 8.0 + number + place / 4
                put(tensor, whole if fill else whole * 0)
            state["step"].fill_(number if fill else 0)
    return model, [optimizer]


def put(tensor: torch.Tensor, whole: torch.Tensor) -> None:
    if hasattr(tensor, "placements"):
        from torch.distributed.tensor import distribute_tensor

        whole = distribute_tensor(whole, tensor.device_mesh, tensor.placements)
    tensor.copy_(whole)


def numbers(model, optimizers) -> list[torch.Tensor]:
    """List all tensors, sharded ones put together again."""
    found = []
    for parameter in model.parameters():
        state = optimizers[0].state[parameter]
        found += [parameter.detach(), state["exp_avg"], state["exp_avg_sq"], state["step"]]
    return [t.full_tensor() if hasattr(t, "full_tensor") else t for t in found]


def save(folder: Path, *steps: int, sharded: bool = False) -> None:
    with Saver(folder, {}) as saver:
        for step in steps:
            saver.save(step, *make(fill=True, sharded=sharded), {"step": step})
    if dist.is_initialized():
        dist.barrier()


def check(folder: Path, step: int, *, sharded: bool = False) -> list[str]:
    """Load the newest checkpoint of a folder and compare it with what was saved; return why others were refused."""
    model, optimizers = make(fill=False, sharded=sharded)
    loaded = load_newest(folder, model, optimizers)
    assert loaded is not None
    assert loaded.progress == {"step": step}
    for got, wanted in zip(numbers(model, optimizers), numbers(*make(fill=True)), strict=True):
        assert torch.equal(got, wanted), (got, wanted)
    return loaded.refused


def two_ranks(root: Path) -> None:
    rank = dist.get_rank()
    for sharded in (False, True):
        check(root / "plain1", 1, sharded=sharded)
        save(root / f"{'sharded' if sharded else 'plain'}2", 1, 2, sharded=sharded)
        check(root / f"{'sharded' if sharded else 'plain'}2", 2, sharded=sharded)
    (root / "parallel").mkdir(exist_ok=True)
    train_alike(root / "parallel")
    begins_alike(root, ("fsdp",))
    fall_back_alike(root / "damaged", rank)
    see_it_late(root / "late", rank)
    fail_alike(root / "failed", rank)


def fall_back_alike(folder: Path, rank: int) -> None:
    """A file that only rank 1 reads is damaged: both ranks take the older checkpoint."""
    save(folder, 1, 2, sharded=True)
    if rank == 0:
        path = folder / "step-00000002" / "rank-00001.bin"
        content = bytearray(path.read_bytes())
        content[0] ^= 1
        path.write_bytes(content)
    dist.barrier()
    (refused,) = check(folder, 1, sharded=True)
    assert "rank-00001.bin: its sha256" in refused


def see_it_late(folder: Path, rank: int) -> None:
    """A file system shows rank 1 everything 2 s late, and each rank has one stale handle: the newest is loaded."""
    shown = time.monotonic() + 2
    real_stat, real_open, stale = os.stat, io.open, [True]

    def stat(path, *words, **more):
        if rank == 1 and str(folder) in str(path) and time.monotonic() < shown:
            raise FileNotFoundError(errno.ENOENT, "not to be seen yet", str(path))
        return real_stat(path, *words, **more)

    def open_(path, *words, **more):
        if rank == 1 and "step-" in str(path) and time.monotonic() < shown:
            raise FileNotFoundError(errno.ENOENT, "not to be seen yet", str(path))
        if stale and str(path).endswith("manifest.json"):
            stale.clear()
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return real_open(path, *words, **more)

    os.stat, io.open = stat, open_
    try:
        save(folder, 1, sharded=True)
        shown = time.monotonic() + 2
        assert check(folder, 1, sharded=True) == []
        assert time.monotonic() > shown or rank == 0
        assert not stale
    finally:
        os.stat, io.open = real_stat, real_open


def fail_alike(folder: Path, rank: int) -> None:
    """The disk of rank 1 is full: rank 0 hears of it, nothing is published, nothing is left."""

    def full(path: Path, content: memoryview) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if rank == 1:
        saver_module.write_durably = full
    saver = Saver(folder, {}, limit=30)
    saver.save(1, *make(fill=True), {"step": 1})
    try:
        saver.wait()
    except StorageError as error:
        assert "rank-00001.bin" in str(error)
    else:
        raise AssertionError("the failure was not told")
    dist.barrier()
    assert list(folder.iterdir()) == []


def four_ranks(root: Path) -> None:
    for name in ("plain2", "sharded2"):
        for sharded in (False, True):
            check(root / name, 2, sharded=sharded)


def main() -> None:
    store, rank, world_size, root = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    {2: two_ranks, 4: four_ranks}[world_size](root)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
