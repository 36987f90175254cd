"""Cut token shards into training batches by (seed, step) alone, and into the text that evaluation scores."""

from __future__ import annotations

import builtins
import hashlib
import resource
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import UserError
from pipeline.lm.shards import Ids, TokenShards
from pipeline.lm.tokenizer import Tokenizer

FILES_BESIDE = 512  # that a rank may have open beside shards: sockets of its ranks, libraries, checkpoints


class Batches:
    """The same global batches at any number of ranks and from any step, with no state to save.

    A window is T + 1 tokens of one shard, of which the last T are predicted. Windows advance by T, so every token is
    predicted once per epoch, save each shard's first and the fewer than T left over at its end. Windows cross
    documents, not shards. Each epoch is a permutation of all windows of its own; the step after an epoch's last whole
    batch takes the rest of it and goes on with the next.
    """

    def __init__(self, shards: TokenShards, sequence_length: int, global_batch_size: int, seed: int) -> None:
        """Prepare batches of `global_batch_size` windows. Raises UserError where there is not one window."""
        self.sequence_length = sequence_length
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.document_end = shards.eos_id
        self._shards = shards
        per_shard = [max(0, (shard.tokens - 1) // sequence_length) for shard in shards.shards]
        self._first_window = np.concatenate(([0], np.cumsum(per_shard, dtype=np.int64)))
        self.num_windows = int(self._first_window[-1])
        if self.num_windows == 0:
            longest = max((shard.tokens for shard in shards.shards), default=0)
            raise UserError(
                f"too little data: the {shards.split} split has {shards.tokens} tokens in {len(shards)} shards "
                f"(longest: {longest}); one window of pretrain.sequence_length {sequence_length} "
                f"needs {sequence_length + 1}. Give more text, or shorten it"
            )
        self._orders: dict[int, NDArray[np.uint32] | NDArray[np.int64]] = {}
        self._open: dict[int, _Opened] = {}
        self._most_open = allow_open_files(len(shards))

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.sequence_length

    def epoch(self, step: int) -> float:
        """Return how often the data has been gone through before `step`."""
        return step * self.global_batch_size / self.num_windows

    def sample_ids(self, step: int) -> NDArray[np.int64]:
        """Return the windows (B,) of the global batch at `step` (0, 1, …), as numbers over all shards."""
        parts = []
        first, end = step * self.global_batch_size, (step + 1) * self.global_batch_size
        while first < end:
            epoch, place = divmod(first, self.num_windows)
            parts.append(self._order(epoch)[place : place + end - first])
            first += len(parts[-1])
        return np.concatenate(parts, dtype=np.int64)

    def batch(self, step: int, rank: int = 0, world_size: int = 1) -> NDArray[np.int64]:
        """Return the rank's windows (B / world_size, T + 1): inputs are [:, :-1], targets [:, 1:].

        The ranks' parts, one below the other, are the global batch. Raises UserError where B can't be cut so.
        """
        if self.global_batch_size % world_size:
            raise UserError(
                f"pretrain.global_batch_size {self.global_batch_size} can't be shared by {world_size} ranks"
            )
        size = self.global_batch_size // world_size
        return self.windows(self.sample_ids(step)[rank * size : (rank + 1) * size])

    def windows(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the tokens (N, T + 1) of the windows numbered `samples` (N,)."""
        shards = np.searchsorted(self._first_window, samples, side="right") - 1
        within = samples - self._first_window[shards]
        if (shards == shards[0]).all():
            return self._opened(int(shards[0])).windows[within].astype(np.int64)
        result = np.empty((len(samples), self.sequence_length + 1), dtype=np.int64)
        starts = (within * self.sequence_length).tolist()
        for row, (shard, start) in enumerate(zip(shards.tolist(), starts, strict=True)):
            result[row] = self._opened(shard).ids[start : start + self.sequence_length + 1]
        return result

    def _opened(self, shard: int) -> _Opened:
        """Map a shard into memory when it is first used."""
        if (opened := self._open.get(shard)) is None:
            if len(self._open) >= self._most_open:
                del self._open[next(iter(self._open))]
            opened = self._open[shard] = _Opened(self._shards[shard], self.sequence_length)
        return opened

    def _order(self, epoch: int) -> NDArray[np.uint32] | NDArray[np.int64]:
        """Return the permutation (num_windows,) of an epoch; the last two used are kept."""
        if epoch not in self._orders:
            while len(self._orders) > 1:
                del self._orders[min(self._orders)]
            windows = np.arange(self.num_windows, dtype=np.uint32 if self.num_windows < 1 << 32 else np.int64)
            self._orders[epoch] = np.random.Generator(np.random.PCG64([self.seed, epoch])).permutation(windows)
        return self._orders[epoch]


class _Opened:
    """A shard that is mapped: its ids (tokens,), and the same as overlapping windows (n, T + 1), without a copy."""

    def __init__(self, ids: Ids, sequence_length: int) -> None:
        self.ids = np.asarray(ids)  # a plain array: slices of np.memmap cost four times as much
        self.windows = np.lib.stride_tricks.sliding_window_view(self.ids, sequence_length + 1)[::sequence_length]


def allow_open_files(number: int) -> int:
    """Let this process have `number` files open beside others, as far as it may; return how many of them it can have.

    Python keeps a descriptor for each file that is mapped, and 1,024 are what a process often starts with.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = number + FILES_BESIDE
    if soft != resource.RLIM_INFINITY and wanted > soft:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return number if soft == resource.RLIM_INFINITY else max(1, min(number, soft - FILES_BESIDE))


@dataclass(frozen=True)
class ValidationText:
    """The documents of a split one after another, each with its end-of-document id.

    `ids` (N,); `bytes` of the original text as UTF-8, what bits per byte divides by; `text` as the tokenizer gives it
    back, which is the original save for U+2581 (see pipeline.lm.tokenizer).
    """

    ids: NDArray[np.int64]
    bytes: int
    text: builtins.bytes

    @property
    def sha256(self) -> str:
        """Name the text: it is the same by whichever tokenizer."""
        return hashlib.sha256(self.text).hexdigest()


def validation_text(shards: TokenShards, tokenizer: Tokenizer) -> ValidationText:
    """Read a whole split into memory. Raises UserError where it was made with another tokenizer or is empty."""
    shards.check_tokenizer(tokenizer)
    if not shards.tokens:
        raise UserError(f"{shards.folder}: the {shards.split} split is empty; see tokenize.validation_fraction")
    ids = np.concatenate([np.asarray(shard, dtype=np.int64) for shard in shards])
    documents = np.split(ids, np.flatnonzero(ids == shards.eos_id) + 1)
    text = "".join(tokenizer.decode(document) for document in documents)
    return ValidationText(ids, shards.bytes, text.encode("utf-8"))
