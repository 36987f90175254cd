"""Time a save: how long training waits (stall) and until the bytes are durable; ours, torch.save and DCP, interleaved.

`nox -s bench -- checkpoint [--rounds N] [--parameters N] [--folder PATH]`. fp32 parameters with AdamW's two moments:
three times the parameters' bytes. Every method ends with fsync of its files. Also the two floors that no save can be
under: a raw write of as many bytes and their sha256. Loads begin with a cold page cache. Ends with one JSON line per
figure; a ratio above 1 is in our favour.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.lm.checkpoint import load_checkpoint
from pipeline.lm.saver import Saver
from pipeline.lm.staging import write_durably
from pipeline.lm.state import training_state

LAYERS, WIDTH = 12, 768
Timing = tuple[float, float]  # stall, durable; seconds


def make(parameters: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model of about so many parameters in matrices of a usual shape, after one step."""
    torch.manual_seed(0)
    blocks = max(1, parameters // (12 * WIDTH * WIDTH))
    model = nn.Sequential(
        *(
            nn.Linear(WIDTH, 4 * WIDTH, bias=False) if i % 2 else nn.Linear(4 * WIDTH, WIDTH, bias=False)
            for i in range(blocks * 3)
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return model, optimizer


def sync_tree(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def forget(folder: Path) -> None:
    """Drop files from the page cache."""
    for path in folder.rglob("*"):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


class Methods:
    """What is measured; each returns (stall, durable) in seconds."""

    def __init__(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.folder, self.model, self.optimizer = folder, model, optimizer
        self.saver = Saver(folder / "ours", {})
        self.step = 0
        self.tensors = training_state(model, [optimizer])[0]
        self.size = sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())
        self.raw = mmap.mmap(-1, -(-self.size // 4096) * 4096)
        for start in range(0, len(self.raw), 2**26):
            self.raw[start : start + 2**26] = os.urandom(min(2**26, len(self.raw) - start))

    def ours(self) -> Timing:
        self.step += 1
        began = time.monotonic()
        self.saver.save(self.step, self.model, [self.optimizer], {})
        stall = time.monotonic() - began
        self.saver.wait()
        return stall, time.monotonic() - began

    def torch_save(self) -> Timing:
        path = self.folder / "torch" / "all.pt"
        path.parent.mkdir()
        began = time.monotonic()
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, path)
        stall = time.monotonic() - began
        sync_tree(path.parent)
        return stall, time.monotonic() - began

    def dcp_save(self) -> Timing:
        began = time.monotonic()
        writer = dcp.FileSystemWriter(self.folder / "dcp", single_file_per_rank=True, sync_files=True)
        dcp.save(dict(self.tensors), storage_writer=writer)
        taken = time.monotonic() - began
        return taken, taken

    def dcp_async_save(self) -> Timing:
        began = time.monotonic()
        writer = dcp.FileSystemWriter(self.folder / "async", single_file_per_rank=True, sync_files=True)
        future = dcp.async_save(dict(self.tensors), storage_writer=writer)
        stall = time.monotonic() - began
        future.result()  # type: ignore[union-attr]
        return stall, time.monotonic() - began

    def raw_write(self) -> Timing:
        began = time.monotonic()
        write_durably(self.folder / "raw.bin", memoryview(self.raw))
        return (time.monotonic() - began,) * 2

    def raw_sha256(self) -> Timing:
        began = time.monotonic()
        hashlib.sha256(self.raw).hexdigest()
        return (time.monotonic() - began,) * 2

    def load(self) -> Timing:
        forget(self.folder / "ours")
        began = time.monotonic()
        load_checkpoint(self.folder / "ours" / f"step-{self.step:08d}", self.model, [self.optimizer])
        return (time.monotonic() - began,) * 2

    def torch_load(self) -> Timing:
        """Load without verifying, into a model that is there."""
        forget(self.folder / "torch")
        began = time.monotonic()
        state = torch.load(self.folder / "torch" / "all.pt", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        return (time.monotonic() - began,) * 2

    def clean(self) -> None:
        """Remove what the last round wrote, so that every round writes new files."""
        for path in [
            self.folder / "torch",
            self.folder / "dcp",
            self.folder / "async",
            *(self.folder / "ours").glob("*"),
        ]:
            shutil.rmtree(path, ignore_errors=True)
        (self.folder / "raw.bin").unlink(missing_ok=True)


def measure(methods: Methods, rounds: int) -> dict[str, list[Timing]]:
    """Run all methods in turn, the first round as a warm-up; the order changes with every round."""
    order: list[Callable[[], Timing]] = [
        methods.ours, methods.torch_save, methods.dcp_save, methods.dcp_async_save,
        methods.raw_write, methods.raw_sha256,
    ]  # fmt: skip
    times: dict[str, list[Timing]] = {}
    for number in range(rounds + 1):
        methods.clean()
        os.sync()
        for method in [*order[number % len(order) :], *order[: number % len(order)], methods.load, methods.torch_load]:
            stall, durable = method()
            print(f"round {number}  {method.__name__:15} stall {stall:6.3f} s  durable {durable:6.3f} s", flush=True)
            if number:
                times.setdefault(method.__name__, []).append((stall, durable))
    return times


def report(times: dict[str, list[Timing]], size: int) -> list[dict[str, Any]]:
    """Make the figures: medians, and the ratio to the best peer."""
    stall = {name: statistics.median(timing[0] for timing in of_method) for name, of_method in times.items()}
    durable = {name: statistics.median(timing[1] for timing in of_method) for name, of_method in times.items()}
    peers = ("torch_save", "dcp_save", "dcp_async_save")
    runs = len(times["ours"])
    floor = max(("raw_write", "raw_sha256"), key=lambda name: durable[name])

    def line(what: str, ours: float, peer: str, best: float) -> dict[str, Any]:
        return {
            "benchmark": f"checkpoint {what}, {size / 1e9:.2f} GB", "ours": round(ours, 4), "unit": "s",
            "best_peer": round(best, 4), "peer": peer, "ratio": round(best / ours, 3), "runs": runs,
        }  # fmt: skip

    best_stall, best_durable = min(peers, key=stall.__getitem__), min(peers, key=durable.__getitem__)
    return [
        line("stall", stall["ours"], best_stall, stall[best_stall]),
        line("durable", durable["ours"], best_durable, durable[best_durable]),
        line("durable against the slower of raw write and sha256", durable["ours"], floor, durable[floor]),
        line("load, verified; the peer's is not", durable["load"], "torch.load", durable["torch_load"]),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parameters", type=int, default=97_500_000)
    parser.add_argument(
        "--folder", type=Path, default=None, help="on the disk to measure; default: the temporary folder"
    )
    options = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # dcp.async_save asks for one
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        methods = Methods(Path(folder), *make(options.parameters))
        print(f"{methods.size / 1e9:.3f} GB in {len(methods.tensors)} tensors, {torch.get_num_threads()} threads")
        figures = report(measure(methods, options.rounds), methods.size)
    dist.destroy_process_group()
    for figure in figures:
        print(json.dumps(figure))
    return 0


if __name__ == "__main__":
    sys.exit(main())
