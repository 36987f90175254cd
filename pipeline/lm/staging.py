"""Memory that a save is copied to, and how it gets to disk without the training thread.

The page cache would cost two to four times the disk's time, so files are written with O_DIRECT where the file system
allows it: from page-aligned memory, in lengths of whole pages.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

PAGE = 4096  # bytes; also a multiple of every disk's block size that O_DIRECT asks for
BLOCK = 64 * 2**20  # bytes per write: few system calls, and none that holds the GIL
PIECE = 8 * 2**20  # bytes that one thread copies at a time
NO_DIRECT_IO = {errno.EINVAL, errno.EOPNOTSUPP}
T = TypeVar("T")


class StagingBuffer:
    """Host memory as large as the largest save so far: allocated once, page-aligned, pinned where there is a GPU."""

    def __init__(self) -> None:
        self.memory: mmap.mmap | None = None
        self.tensor: Tensor = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        """Return `size` bytes (uint8), a multiple of the page size; what they held before is lost."""
        if size > self.tensor.numel():
            self._unpin()
            self.tensor = torch.empty(0, dtype=torch.uint8)  # lets go of the old memory first
            self.memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                self._advise_huge()
            self.tensor = torch.frombuffer(self.memory, dtype=torch.uint8)
            self._pin()
        return self.tensor[:size]

    def touch(self, size: int) -> None:
        """Make the memory real, so that the first save need not: zeroing pages is slower than copying to them."""
        if size:
            ctypes.memset(self.take(size).data_ptr(), 0, size)  # ctypes lets go of the GIL meanwhile

    def _advise_huge(self) -> None:
        assert self.memory is not None
        try:
            self.memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without transparent huge pages; only slower
            return

    def _pin(self) -> None:
        if has_gpu():  # copies from the GPU are then made by it, at the speed of the bus
            torch.cuda.cudart().cudaHostRegister(self.tensor.data_ptr(), self.tensor.numel(), 0)  # type: ignore[no-untyped-call]

    def _unpin(self) -> None:
        if self.memory is not None and has_gpu():
            torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())  # type: ignore[no-untyped-call]


def has_gpu() -> bool:
    """Tell whether this process computes on a GPU."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def aligned(size: int, to: int) -> int:
    """Round up to a multiple."""
    return -(-size // to) * to


def copy_all(copies: list[tuple[Tensor, Tensor]]) -> None:
    """Copy (target, source) pairs of contiguous CPU tensors of the same bytes, on as many threads as torch uses.

    Not by torch's copy_: that waits for its slowest thread at every tensor, and took 1.0 s where this takes 0.4 s
    (1.1 GB in 117 tensors, 2 threads, 2 busy cores).
    """
    pieces = [
        (target.data_ptr() + start, source.data_ptr() + start, min(PIECE, size - start))
        for target, source in copies
        for size in [source.numel() * source.element_size()]
        for start in range(0, size, PIECE)
    ]

    def work() -> None:
        for piece in shared:
            ctypes.memmove(*piece)  # lets go of the GIL meanwhile

    shared = iter(pieces)  # each thread takes the next one
    threads = [threading.Thread(target=work) for _ in range(torch.get_num_threads() - 1)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()


@contextmanager
def aside(work: Callable[[], T]) -> Iterator[Future[T]]:
    """Work in another thread while the body runs; it has ended when the body has, whatever happened there."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        yield thread.submit(work)


def sha256(content: memoryview) -> str:
    """Hash memory; large blocks leave the GIL to others."""
    return hashlib.sha256(content).hexdigest()


def write_durably(path: Path, content: memoryview) -> None:
    """Write page-aligned memory to a new file and fsync it; without O_DIRECT where that is refused (tmpfs)."""
    try:
        _write(path, content, os.O_DIRECT)
    except OSError as error:
        if error.errno not in NO_DIRECT_IO:
            raise
        _write(path, content, 0)


def _write(path: Path, content: memoryview, flags: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | flags, 0o666)
    try:
        written = 0
        while written < len(content):
            written += os.write(fd, content[written : written + BLOCK])
        os.fsync(fd)
    finally:
        os.close(fd)
