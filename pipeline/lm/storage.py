"""Copy a training state into memory of ours, one file's worth per rank, as torch.distributed.checkpoint (DCP) plans it.

DCP plans which rank writes which box of which tensor, so that sharded tensors and replicated ones are each written
once. Its collectives run in the training thread, and only when the state has another structure than at the save before:
planning takes a quarter of the time that copying does. Copying, writing and renaming need no other rank.
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
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.distributed.checkpoint.utils import find_state_dict_object
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


class Stager:
    """Stages a state again and again, into one buffer."""

    def __init__(self) -> None:
        self.buffer = StagingBuffer()
        self.layout = Layout()
        self.structure: list[Any] | None = None  # that the layout is for
        self.count = 0

    def stage(self, tensors: dict[str, Tensor]) -> Staged:
        """Copy this rank's share of `tensors` into the buffer; all ranks call it, with states of the same structure."""
        structure = [_structure(name, tensor) for name, tensor in tensors.items()]
        if structure != self.structure:
            self.layout, self.structure = _plan(tensors), structure
        self.count += 1
        layout, parts = self.layout, []
        content = self.buffer.take(layout.bytes)
        copies, former = [], 0
        for place in layout.places:
            content[former : place.begin].zero_()  # the same state makes the same file
            former = place.end
            if place.end == place.begin:
                continue
            source = find_state_dict_object(tensors, place.index).detach()
            part = content[place.begin : place.end].view(source.dtype).view(source.shape)
            parts.append((place.index.fqn, part))
            if source.device.type == "cpu" and source.is_contiguous():
                copies.append((part, source))
            else:
                part.copy_(source, non_blocking=True)
        content[former:].zero_()
        copy_all(copies)
        if has_gpu():
            torch.cuda.current_stream().synchronize()
        nonce = f"{layout.nonce}.{self.count}"
        return Staged(nonce, layout.file, content, parts, layout.tensors, layout.total_bytes)


@dataclass(frozen=True)
class Place:
    """Where in the file a box of a tensor lies."""

    index: MetadataIndex
    begin: int
    end: int


@dataclass
class Layout(StorageWriter):
    """What DCP has planned: this rank's file, and on rank 0 all tensors. As a StorageWriter it writes nothing."""

    nonce: str = ""
    file: str = ""
    places: list[Place] = dataclasses.field(default_factory=list)
    bytes: int = 0  # of the file, whole pages
    tensors: dict[str, StoredTensor] = dataclasses.field(default_factory=dict)
    total_bytes: int = 0

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
        """Lay the plan's boxes out in this rank's file."""
        self.nonce, self.file = plan.storage_data
        end = 0
        for item in plan.items:
            begin = aligned(end, ALIGNMENT)
            end = begin + _size(item)
            self.places.append(Place(item.index, begin, end))
        self.bytes = aligned(end, PAGE)
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(p.index, p.end - p.begin, (self.file, p.begin)) for p in self.places])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Describe the whole; called on rank 0 when all ranks have laid out their files."""
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


def _plan(tensors: dict[str, Tensor]) -> Layout:
    """Have DCP plan a save of `tensors`, with the other ranks."""
    layout = Layout()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.save(tensors, storage_writer=layout, no_dist=not dist.is_initialized())
    except CheckpointException as error:  # no Exception, and so nothing that our callers would catch
        raise CheckpointError(f"this state cannot be saved: {error}") from error
    return layout


def _structure(name: str, tensor: Tensor) -> tuple[Any, ...]:
    """Return what a plan depends on."""
    return name, tensor.dtype, tensor.shape, getattr(tensor, "placements", None), getattr(tensor, "device_mesh", None)


def _size(item: WriteItem) -> int:
    """Return the bytes of the box that an item writes."""
    if item.tensor_data is None:
        raise TypeError(f"{item.index.fqn} is not a tensor")
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
