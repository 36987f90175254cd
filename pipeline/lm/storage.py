"""Where torch.distributed.checkpoint (DCP) puts a checkpoint: into memory of ours, one file's worth per rank.

DCP plans: which rank writes which box of which tensor, so that sharded tensors and replicated ones are each written
once. Its collectives run in the training thread. What follows, writing and renaming, needs none.
"""

from __future__ import annotations

import dataclasses
import math
import os
import secrets
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from pipeline.lm.contents import CheckpointError, Chunk, StoredTensor
from pipeline.lm.staging import PAGE, StagingBuffer, aligned, copy_all, has_gpu

ALIGNMENT = 64  # bytes: a cache line, and enough for every dtype


@dataclass(frozen=True)
class Staged:
    """A checkpoint in memory. `tensors` and `total_bytes` (of all ranks' files) are known on rank 0 only."""

    nonce: str  # names the temporary folder: no two saves share one, also not those of two attempts
    file: str  # that this rank writes
    content: Tensor  # (bytes,) uint8
    parts: list[tuple[str, Tensor]]  # views of it
    tensors: dict[str, StoredTensor]
    total_bytes: int


def stage(tensors: dict[str, Tensor], buffer: StagingBuffer) -> Staged:
    """Copy this rank's share of `tensors` into the buffer; all ranks call it."""
    writer = StagingWriter(buffer)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.save(tensors, storage_writer=writer, no_dist=not dist.is_initialized())
    except CheckpointException as error:  # no Exception, and so nothing that our callers would catch
        raise CheckpointError(f"this state cannot be saved: {error}") from error
    return writer.staged()


class StagingWriter(StorageWriter):
    """Copy the planned boxes into a buffer."""

    def __init__(self, buffer: StagingBuffer) -> None:
        self.buffer = buffer
        self.nonce, self.file = "", ""
        self.content = torch.empty(0, dtype=torch.uint8)
        self.parts: list[tuple[str, Tensor]] = []
        self.tensors: dict[str, StoredTensor] = {}
        self.total_bytes = 0

    def staged(self) -> Staged:
        return Staged(self.nonce, self.file, self.content, self.parts, self.tensors, self.total_bytes)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # a checkpoint is named by its step, not by DCP

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        return None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        return None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Tell every rank its file and the nonce; called on rank 0."""
        nonce = secrets.token_hex(4)
        return [
            dataclasses.replace(plan, storage_data=(nonce, f"rank-{rank:05d}.bin")) for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Lay the plan's boxes out in the buffer and copy them."""
        self.nonce, self.file = plan.storage_data
        places, end = [], 0
        for item in plan.items:
            begin = aligned(end, ALIGNMENT)
            end = begin + _size(item)
            places.append((item, begin, end))
        self.content = self.buffer.take(aligned(end, PAGE))
        results, former, copies = [], 0, []
        for item, begin, end in places:
            self.content[former:begin].zero_()  # the same state makes the same file
            copies += self._copy(item, planner, begin, end)
            former = end
            results.append(WriteResult(item.index, end - begin, (self.file, begin)))
        self.content[former:].zero_()
        copy_all(copies)
        if has_gpu():
            torch.cuda.current_stream().synchronize()
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _copy(self, item: WriteItem, planner: SavePlanner, begin: int, end: int) -> list[tuple[Tensor, Tensor]]:
        """Begin the copy of a box from a GPU; return that of one in memory, to be made with the others."""
        source = planner.resolve_data(item)
        assert isinstance(source, Tensor)
        if end == begin:
            return []
        part = self.content[begin:end].view(source.dtype).view(source.shape)
        self.parts.append((item.index.fqn, part))
        if source.device.type == "cpu" and source.is_contiguous():
            return [(part, source)]
        part.copy_(source.detach(), non_blocking=True)
        return []

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Describe the whole; called on rank 0 when all ranks have staged."""
        places = {(r.index.fqn, tuple(r.index.offset or ())): r.storage_data for of_rank in results for r in of_rank}
        for name, stored in metadata.state_dict_metadata.items():
            assert isinstance(stored, dcp.TensorStorageMetadata)
            chunks = [
                Chunk(tuple(chunk.offsets), tuple(chunk.sizes), *places[name, tuple(chunk.offsets)])
                for chunk in stored.chunks
                if math.prod(chunk.sizes)
            ]
            self.tensors[name] = StoredTensor(stored.properties.dtype, tuple(stored.size), tuple(chunks))
        self.total_bytes = sum(result.size_in_bytes for of_rank in results for result in of_rank)


def _size(item: WriteItem) -> int:
    """Return the bytes of the box that an item writes."""
    if item.tensor_data is None:
        raise TypeError(f"{item.index.fqn} is not a tensor")
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
