"""Find token shards that are not what tokenize wrote, without reading all of them at every start.

    control/verified.json
    {"train-00000.bin": {"sha256": SHA256, "stat": [size, mtime_ns, ctime_ns, inode]}, …}

A shard is read and hashed when its file is not the one that was hashed last, as far as the file system knows. The ranks
share the work. What changes under a file system's nose (a rotten disk) is not seen here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pipeline.errors import UserError
from pipeline.files import read_json, sha256_file, stat_of, write_json
from pipeline.lm.shards import INDEX, Shard, TokenShards
from pipeline.lm.together import from_all

THREADS = 8  # per rank at most: each hashes 1 to 2 GB/s, more than most file systems give one host
NAMES_SHOWN = 10


@dataclass(frozen=True)
class Verification:
    """What one look at the shards of a split has cost."""

    shards: int
    hashed: int  # of them; the others were known
    bytes: int  # hashed


def verify_shards(
    shards: TokenShards, record: Path | None = None, progress: Callable[[], None] = lambda: None
) -> Verification:
    """Hash the shards that `record` does not know; all ranks call it, each takes its share.

    Without a `record` all are hashed. `progress` is called after each shard. Raises UserError on every rank, naming the
    shards whose content is not what the index says; the others are remembered all the same.
    """
    known = _read(record)
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    def share() -> list[tuple[Shard, dict[str, Any], bool]]:
        mine = [(shard, _look(shards, shard)) for shard in shards.shards[rank::world_size]]
        fresh = [(shard, entry) for shard, entry in mine if known.get(shard.file) != entry]

        def check(shard: Shard) -> bool:
            right = sha256_file(shards.folder / shard.file) == shard.sha256
            progress()
            return right

        with ThreadPoolExecutor(min(THREADS, len(os.sched_getaffinity(0)))) as pool:
            rights = pool.map(check, [shard for shard, _ in fresh])
            return [(shard, entry, right) for (shard, entry), right in zip(fresh, rights, strict=True)]

    hashed = [found for of_rank in from_all(share) for found in of_rank]
    right = {shard.file: entry for shard, entry, right in hashed if right}
    if record is not None and rank == 0 and right:
        write_json(record, known | right)
    if wrong := sorted(shard.file for shard, _, right in hashed if not right):
        raise UserError(_not_as_written(shards.folder, wrong))
    return Verification(len(shards), len(hashed), sum(shard.tokens for shard, *_ in hashed) * shards.dtype.itemsize)


def _not_as_written(folder: Path, names: list[str]) -> str:
    shown = ", ".join(str(folder / name) for name in names[:NAMES_SHOWN]) + (" …" if len(names) > NAMES_SHOWN else "")
    return (
        f"{shown}: the content is not what tokenize wrote (sha256 in {folder / INDEX}). Put the right files back; "
        "to make them again from the text, remove that index and run tokenize"
    )


def _look(shards: TokenShards, shard: Shard) -> dict[str, Any]:
    """Return what will be known of a shard if its hash is right; taken before it is read."""
    path = shards.folder / shard.file
    try:
        return {"sha256": shard.sha256, "stat": stat_of(path)}
    except OSError as error:
        raise UserError(f"{path}: can't read this token shard: {error.strerror}") from error


def _read(record: Path | None) -> dict[str, Any]:
    """Return what is known; nothing where the record is damaged: then all is hashed again."""
    try:
        known = read_json(record) if record is not None else None
    except ValueError:
        return {}
    return known if isinstance(known, dict) else {}
