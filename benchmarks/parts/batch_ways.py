"""The ways to read batches that are compared, each run in a process and an environment of its own.

`python batch_ways.py WAY FOLDER` prints {"open_s", "tokens_per_s", "tokens_per_cpu_s"} of one epoch, or of 2,000 steps
after a first that is not measured. The peers' copies of the tokens are made beside them, once.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

T, BATCH = 512, 16
Opened = tuple[float, Callable[[], Iterator[Any]], int]  # seconds, makes the batches of an epoch, how many there are


def make_shards(folder: Path, tokens: int, shards: int) -> Path:
    """Write random ids as token shards with an index, made once; the order of reading them is not random text's."""
    if (folder / "index.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    size, listed = tokens // shards, []
    for number in range(shards):
        ids = generator.integers(2, 16_384, size).astype("<u2")
        name = f"train-{number:05d}.bin"
        ids.tofile(folder / name)
        listed.append({"file": name, "documents": 1, "bytes": 4 * size, "tokens": size,
                       "sha256": hashlib.sha256(ids.tobytes()).hexdigest()})  # fmt: skip
    split = {"documents": shards, "duplicates": 0, "bytes": 4 * size * shards, "tokens": size * shards,
             "longest_document": 4 * size, "bytes_per_token": 4.0, "shards": listed}  # fmt: skip
    index = {"format": 1, "inputs": "", "dtype": "uint16",
             "tokenizer": {"fingerprint": "", "vocab_size": 16_384, "eos_id": 1, "exact": True},
             "read": {}, "splits": {"train": split}}  # fmt: skip
    (folder / "index.json").write_text(json.dumps(index))
    return folder


def ours(folder: Path) -> Opened:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from pipeline.lm.batches import Batches
    from pipeline.lm.shards import TokenShards

    started = time.perf_counter()
    batches = Batches(TokenShards(folder, "train"), T, BATCH, seed=1)
    opened = time.perf_counter() - started
    steps = batches.num_windows // BATCH
    return opened, lambda: (batches.batch(step) for step in range(steps)), steps


def _ids(folder: Path) -> np.memmap[Any, np.dtype[np.uint16]]:
    return np.memmap(folder / "train-00000.bin", np.uint16, "r")


def dataloader(folder: Path) -> Opened:
    """Read by torch's DataLoader from a memory map, in this process: worker processes make it slower."""
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Windows(Dataset):  # type: ignore[type-arg]
        def __init__(self) -> None:
            self.ids = _ids(folder)

        def __len__(self) -> int:
            return (len(self.ids) - 1) // T

        def __getitem__(self, number: int) -> tuple[Any, Any]:
            ids = torch.from_numpy(self.ids[number * T : number * T + T + 1].astype(np.int64))
            return ids[:-1], ids[1:]

    started = time.perf_counter()
    loader: Any = DataLoader(Windows(), batch_size=BATCH, shuffle=True, drop_last=True)
    return time.perf_counter() - started, lambda: iter(loader), len(loader)


def litdata(folder: Path) -> Opened:
    """Read by litdata's StreamingDataset and TokensLoader, from its own chunks."""
    import torch
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader
    from litdata.streaming.writer import BinaryWriter

    chunks = folder.with_name(folder.name + "-litdata")
    if not (chunks / "index.json").is_file():
        shutil.rmtree(chunks, ignore_errors=True)
        writer = BinaryWriter(str(chunks), chunk_size=(T + 1) * 4096, item_loader=TokensLoader(T + 1))
        ids = _ids(folder).astype(np.uint16)
        usable = len(ids) // (T + 1) * (T + 1)
        for number, document in enumerate(np.split(ids[:usable], usable // (T + 1))):
            writer[number] = torch.from_numpy(document.copy())
        writer.done()
        writer.merge()
    started = time.perf_counter()
    dataset = StreamingDataset(str(chunks), item_loader=TokensLoader(T + 1), shuffle=True, drop_last=True)
    loader = StreamingDataLoader(dataset, batch_size=BATCH, num_workers=0, drop_last=True)
    opened = time.perf_counter() - started

    def batches() -> Iterator[Any]:
        for batch in loader:
            rows = batch.to(torch.int64)
            yield rows[:, :-1], rows[:, 1:]

    return opened, batches, len(dataset) // BATCH


def streaming(folder: Path) -> Opened:
    """Read by MosaicML streaming's StreamingDataset, from samples of T + 1 tokens in its own format."""
    from streaming import MDSWriter, StreamingDataset
    from torch.utils.data import DataLoader

    samples = folder.with_name(folder.name + "-mds")
    if not (samples / "index.json").is_file():
        shutil.rmtree(samples, ignore_errors=True)
        ids = _ids(folder)
        with MDSWriter(out=str(samples), columns={"ids": f"ndarray:uint16:{T + 1}"}) as writer:
            for number in range((len(ids) - 1) // T):
                writer.write({"ids": np.asarray(ids[number * T : number * T + T + 1])})
    started = time.perf_counter()
    dataset = StreamingDataset(local=str(samples), shuffle=True, batch_size=BATCH)
    loader: Any = DataLoader(dataset, batch_size=BATCH, drop_last=True, collate_fn=_stack)
    return time.perf_counter() - started, lambda: iter(loader), len(dataset) // BATCH


def _stack(samples: list[dict[str, Any]]) -> Any:
    import torch

    rows = torch.from_numpy(np.stack([sample["ids"] for sample in samples]).astype(np.int64))
    return rows[:, :-1], rows[:, 1:]


WAYS: dict[str, Callable[[Path], Opened]] = {
    "ours": ours, "dataloader": dataloader, "litdata": litdata, "streaming": streaming,
}  # fmt: skip


if __name__ == "__main__":
    opened, make, steps = WAYS[sys.argv[1]](Path(sys.argv[2]))
    endless = (batch for epoch in cycle([make]) for batch in epoch())
    next(endless)
    started, cpu = time.perf_counter(), time.process_time()
    tokens = BATCH * T * sum(1 for _ in islice(endless, min(steps - 1, 2000)))
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    print(json.dumps({"open_s": opened, "tokens_per_s": tokens / seconds, "tokens_per_cpu_s": tokens / cpu}))
