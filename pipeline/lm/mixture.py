"""Mix several sources by weight: which of them each sequence of the global order comes from.

Sequences are counted through all steps: sequence i of step s is number s * global_batch_size + i. In every BLOCK of
them each source has its share, rounded to a whole number and at least one, in an order drawn from (seed, block). So any
place is found without going through those before it, by any number of ranks and from any step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pipeline.config.schema import Config
from pipeline.errors import UserError
from pipeline.lm.batches import Batches
from pipeline.lm.shards import TokenShards

BLOCK = 1000  # sequences; shares are kept to a thousandth
STREAM = 0x6D6978  # keeps these random numbers apart from those of the epochs


class Mixture:
    """Which source each sequence comes from, a pure function of (seed, number of the sequence)."""

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        """Mix len(weights) sources; `weights` are positive and relative to each other."""
        self.counts = share_out(weights, max(BLOCK, len(weights)))
        self.block = int(self.counts.sum())
        self.seed = seed
        self._known: tuple[int, NDArray[np.int64], NDArray[np.int64]] | None = None

    def places(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return of each sequence (N,) its source (N,), and how many came from that source before it (N,)."""
        sources, places = np.empty_like(numbers), np.empty_like(numbers)
        blocks, inside = np.divmod(numbers, self.block)
        for block in np.unique(blocks):
            chosen = blocks == block
            order, before = self._order(int(block))
            sources[chosen] = order[inside[chosen]]
            places[chosen] = before[inside[chosen]] + int(block) * self.counts[sources[chosen]]
        return sources, places

    def _order(self, block: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the sources of a block's sequences, and how many of the block came from the same one before each."""
        if self._known is None or self._known[0] != block:
            order = np.repeat(np.arange(len(self.counts)), self.counts)
            order = np.random.Generator(np.random.PCG64([self.seed, STREAM, block])).permutation(order)
            before = np.empty_like(order)
            for source, count in enumerate(self.counts):
                before[order == source] = np.arange(count)
            self._known = block, order, before
        return self._known[1:]


def share_out(weights: Sequence[float], total: int) -> NDArray[np.int64]:
    """Share `total` out by weight in whole numbers of at least one, by largest remainders."""
    shares = np.array(weights, np.float64) / sum(weights) * total
    counts = np.maximum(1, np.floor(shares).astype(np.int64))
    for _ in range(total - int(counts.sum())):
        counts[np.argmax(shares - counts)] += 1
    for _ in range(int(counts.sum()) - total):  # where many had to be given their one
        counts[np.argmax(np.where(counts > 1, counts - shares, -np.inf))] -= 1
    return counts


class MixedBatches(Batches):
    """Batches of several sources, each with its share; epochs are those of each source by itself."""

    def __init__(
        self, shards: TokenShards, sequence_length: int, global_batch_size: int, seed: int, weights: Sequence[float]
    ) -> None:
        """Mix the sources of data: by `weights`, one for each. Raises UserError where one has not one window."""
        super().__init__(shards, sequence_length, global_batch_size, seed)
        self._mixture = Mixture(weights, seed)
        per_source = np.zeros(len(weights), np.int64)
        np.add.at(per_source, [shard.source for shard in shards.shards], np.diff(self._first_window))
        self._windows_of = per_source
        self._first_of = np.cumsum(per_source) - per_source  # shards are in the order of their sources
        for number, windows in enumerate(per_source, start=1):
            if not windows:
                raise UserError(
                    f"too little data: item {number} of data: has no window of pretrain.sequence_length "
                    f"{sequence_length} in the {shards.split} split; give more text, or leave it out"
                )
        self._orders_of: dict[int, tuple[int, NDArray[np.int64]]] = {}

    def epoch(self, step: int) -> float:
        """Return how often the source that is repeated most has been gone through before `step`."""
        shares = self._mixture.counts / self._mixture.block
        return float(np.max(step * self.global_batch_size * shares / self._windows_of))

    def sample_ids(self, step: int) -> NDArray[np.int64]:
        """Return the windows (B,) of the global batch at `step` (0, 1, …), as numbers over all shards."""
        numbers = np.arange(step * self.global_batch_size, (step + 1) * self.global_batch_size, dtype=np.int64)
        sources, places = self._mixture.places(numbers)
        epochs, inside = np.divmod(places, self._windows_of[sources])
        samples = np.empty_like(numbers)
        for source, epoch in sorted(set(zip(sources.tolist(), epochs.tolist(), strict=True))):
            chosen = (sources == source) & (epochs == epoch)
            samples[chosen] = self._first_of[source] + self._order_in(source, epoch)[inside[chosen]]
        return samples

    def _order_in(self, source: int, epoch: int) -> NDArray[np.int64]:
        """Return the permutation (windows of the source,) of one of its epochs; the last one used is kept."""
        if self._orders_of.get(source, (-1,))[0] != epoch:
            generator = np.random.Generator(np.random.PCG64([self.seed, epoch, source]))
            self._orders_of[source] = epoch, generator.permutation(int(self._windows_of[source]))
        return self._orders_of[source][1]


def make_batches(shards: TokenShards, config: Config) -> Batches:
    """Return the batches of the config's training: of all text alike, or of its sources by weight."""
    pretrain = config.pretrain
    weights = [source.weight for source in config.data if source.weight is not None]
    if not weights:
        return Batches(shards, pretrain.sequence_length, pretrain.global_batch_size, config.seed)
    return MixedBatches(shards, pretrain.sequence_length, pretrain.global_batch_size, config.seed, weights)
