"""One rank of tests/faults/test_parallel.py, also called by tests/ranks.py: `parallel_ranks.py STORE RANK WORLD_SIZE FOLDER`.

Raises where something is not as it should be.
"""

from __future__ import annotations

import json
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from test_trainer import FakeBatches, StopAt, config

from pipeline.errors import UserError
from pipeline.files import read_lines
from pipeline.inference.hugging_face import weight_files
from pipeline.lm import export as exporting
from pipeline.lm.hardware import Hardware
from pipeline.lm.model import Transformer
from pipeline.lm.muon import SharedMuon, orthogonalize
from pipeline.lm.parallel import make_mesh
from pipeline.lm.tokenizer import Tokenizer, train_tokenizer
from pipeline.lm.trainer import Files, Trainer

STEPS = 8


def trainer(
    folder: Path, parallel: str, stop_after: int | None = None, on_node: int = 0, *, compiled: bool = False, **keys: Any
) -> Trainer:
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    hardware = Hardware("cpu", "fp32", compiled, 1, rank, rank, ranks, on_node or ranks)
    folder.mkdir(exist_ok=True)
    files = Files(folder / "checkpoints", folder / "metrics.jsonl", lambda kind, **details: None, StopAt(stop_after))
    return Trainer(config(max_steps=STEPS, parallel=parallel, **keys), hardware, FakeBatches(), files, {})


def curve(folder: Path) -> list[tuple[float, float]]:
    return [(record["loss"], record["grad_norm"]) for record in read_lines(folder / "metrics.jsonl")]


def weights(run: Trainer) -> list[torch.Tensor]:
    """Return the weights, sharded ones put together again; all ranks call it."""
    found = [parameter.detach() for parameter in run.stepper.model.parameters()]
    return [w.full_tensor() if hasattr(w, "full_tensor") else w for w in found]


def close(some: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    for a, b in zip(some, others, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def train_alike(root: Path, kinds: tuple[str, ...] = ("fsdp",), optimizers: tuple[str, ...] = ("muon",)) -> None:
    """Sharded and replicated training differ by the order of sums, and a resumed one not at all from its twin."""
    on_node = max(1, dist.get_world_size() // 2)
    for optimizer in optimizers:
        keys: dict[str, Any] = {"optimizer": optimizer, "micro_batch_size": 1, "on_node": on_node}
        keys |= {"z_loss": 1e-3, "activation_checkpointing": "selective", "loss_chunk_size": 5}
        plain = trainer(root / f"ddp-{optimizer}", "ddp", **keys)
        plain.train()
        wanted = weights(plain)
        for kind in kinds:
            folder = root / f"{kind}-{optimizer}"
            run = trainer(folder, kind, **keys)
            close(
                weights(trainer(root / "untrained", "ddp", **keys)), weights(trainer(root / "untrained", kind, **keys))
            )
            run.train()
            dist.barrier()
            torch.testing.assert_close(
                torch.tensor(curve(folder)), torch.tensor(curve(root / f"ddp-{optimizer}")), rtol=1e-4, atol=1e-4
            )
            close(weights(run), wanted)
            resumes_exactly(root, kind, folder, run, keys)


def resumes_exactly(root: Path, kind: str, twin_folder: Path, twin: Trainer, keys: dict[str, Any]) -> None:
    folder = root / f"{twin_folder.name}-stopped"
    assert trainer(folder, kind, stop_after=5, **keys).train().stopped == "told to"
    again = trainer(folder, kind, **keys)
    assert again.train().step == STEPS
    dist.barrier()
    assert curve(folder) == curve(twin_folder)
    for a, b in zip(weights(again), weights(twin), strict=True):
        assert torch.equal(a, b)


def compiles_alike(root: Path) -> None:
    """Compiled layers work under DDP and FSDP; they are traced only, since a C++ compiler would take minutes."""
    torch.compile = partial(torch.compile, backend="aot_eager")  # type: ignore[assignment]
    runs = []
    for kind in ("ddp", "fsdp"):
        keys: dict[str, Any] = {"micro_batch_size": 1, "activation_checkpointing": "selective", "loss_chunk_size": 8}
        run = trainer(root / f"compiled-{kind}", kind, compiled=True, **keys)
        runs.append(torch.tensor([run.stepper.make_step() for _ in range(3)]))
    torch.testing.assert_close(*runs, rtol=1e-4, atol=1e-4)


def begin_alone(root: Path) -> None:
    """Export a model into `root`, in several files, and note the first loss of training that begins with it on one rank."""
    wanted = config()
    model = Transformer(wanted.model, wanted.tokenize.vocab_size, wanted.pretrain.sequence_length)
    model.init_weights(3)
    words = [f"one {a} and two {b}".encode() for a in "abcdef" for b in "ghijkl"]
    train_tokenizer(words, wanted.tokenize, root / "tokenizer.model")
    folder = root / "exported"
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporting, "SHARD_BYTES", 10_000)
        exporting.export_model(model, Tokenizer(root / "tokenizer.model"), folder, "fp32")
    assert len(weight_files(folder)) > 1
    run = trainer(root / "alone", "ddp", stop_after=0, init_from=str(folder))
    run.train()
    (root / "first.json").write_text(json.dumps(run.stepper.make_step()))


def begins_alike(root: Path, kinds: tuple[str, ...]) -> None:
    """What begins with an exported folder has its very weights, and the first loss of one rank; all fail where one does."""
    folder, ranks = root / "exported", dist.get_world_size()
    saved = {name: tensor for path in weight_files(folder) for name, tensor in load_file(path).items()}
    first = json.loads((root / "first.json").read_text())
    for kind in kinds:
        keys: dict[str, Any] = {"micro_batch_size": 1, "on_node": max(1, ranks // 2)}
        run = trainer(root / f"begun-{kind}-{ranks}", kind, stop_after=0, init_from=str(folder), **keys)
        run.train()
        names = [name for name, _ in run.stepper.model.named_parameters()]
        assert sorted(names) == sorted(saved)
        for name, begun in zip(names, weights(run), strict=True):
            assert torch.equal(begun, saved[name]), name
        torch.testing.assert_close(torch.tensor(run.stepper.make_step()), torch.tensor(first), rtol=1e-5, atol=1e-5)
    missing = str(folder if dist.get_rank() != 1 else root / "nowhere")
    with pytest.raises(UserError, match="nowhere holds neither"):
        trainer(root / f"fails-{ranks}", kinds[0], init_from=missing).train()


def orthogonalizes_alone(root: Path) -> None:
    """Matrices whose rows do not divide by the ranks, more and fewer than ranks: each update is that of one rank."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = make_mesh(config(parallel="fsdp"), Hardware("cpu", "fp32", False, 1, 0, 0, dist.get_world_size(), 1))
    whole = [torch.randn(rows, 6, generator=torch.Generator().manual_seed(rows)) for rows in (1, 9, 5, 6, 4)]
    sharded = [torch.nn.Parameter(distribute_tensor(matrix, mesh, [Shard(0)])) for matrix in whole]
    for p, matrix in zip(sharded, whole, strict=True):
        p.grad = distribute_tensor(matrix, mesh, [Shard(0)])
    optimizer = SharedMuon(sharded, lr=1.0, weight_decay=0.0, momentum=0.0, adjust_lr_fn="match_rms_adamw")
    optimizer.step()
    group = optimizer.param_groups[0]
    for p, matrix in zip(sharded, whole, strict=True):
        update = orthogonalize(matrix, group["ns_coefficients"], group["ns_steps"])
        assert torch.equal(p.detach().full_tensor(), matrix.add(update, alpha=-0.2 * max(matrix.shape) ** 0.5))


def loads_elsewhere(root: Path, kinds: tuple[str, ...]) -> None:
    """What other ranks have saved, sharded or not, is what these go on from."""
    for kind in kinds:
        for name in ("ddp-muon", "fsdp-muon"):
            folder = root / f"{name}-at-{dist.get_world_size() if dist.is_initialized() else 1}-{kind}"
            if not dist.is_initialized() or dist.get_rank() == 0:
                shutil.copytree(root / name, folder)
            if dist.is_initialized():
                dist.barrier()
            run = trainer(folder, kind, micro_batch_size=1)
            assert run.resume()
            assert run.step == STEPS
            assert run.stepper.make_step()[0] < curve(folder)[0][0]
            saved = torch.load(root / "wanted.pt")
            close(saved, weights(trainer_of(folder, kind)))


def trainer_of(folder: Path, kind: str) -> Trainer:
    run = trainer(folder, kind)
    run.resume()
    return run


def main() -> None:
    store, rank, world_size, root = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    orthogonalizes_alone(root)
    if world_size == 2:
        train_alike(root, ("fsdp",), ("muon", "adamw"))
        compiles_alike(root)
        begins_alike(root, ("ddp", "fsdp"))
        wanted = weights(trainer_of(root / "fsdp-muon", "fsdp"))
        if rank == 0:
            torch.save(wanted, root / "wanted.pt")
    else:
        loads_elsewhere(root, ("ddp", "fsdp", "hsdp"))
        begins_alike(root, ("ddp", "fsdp", "hsdp"))
        (root / "four").mkdir(exist_ok=True)
        train_alike(root / "four", ("fsdp", "hsdp"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
