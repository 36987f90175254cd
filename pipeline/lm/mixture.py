"""Mix several sources by weight: which of them each sequence of the global order comes from.

Sequences are counted through all steps: sequence i of step s is number s * global_batch_size + i. In every BLOCK of
them each source has its share, rounded to a whole number and at least one, in an order drawn from (seed, block). So any
place is found without going through those before it, by any number of ranks and from any step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

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
