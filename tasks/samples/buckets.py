"""Orders of an epoch: a permutation, and one in which samples of like length come together.

Both are pure functions of (seed, epoch, place), so a position is a number and nothing is stored.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tasks.samples.order import permute

RUN = 16  # samples of like length in a row
BLOCK = 1024  # places of the permutation that are sorted among themselves


class Order(Protocol):
    """Which sample stands at a place of an epoch."""

    def locate(self, epoch: int, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples at places `offsets` (K,) of an epoch -> (K,)."""


class Shuffled:
    """A seeded permutation of 0 .. count-1."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed

    def locate(self, epoch: int, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `Order`."""
        return permute(offsets, self.count, self.seed, epoch)


class Bucketed:
    """The permutation in blocks, each sorted by length, cut into runs, the runs shuffled.

    A batch taken from it has samples of like length, so little of it is padding; batches of long and of short
    samples still alternate.

    Args:
        lengths: (N,) of the samples. seed: of the order.
    """

    def __init__(self, lengths: NDArray[np.int64], seed: int) -> None:
        self.lengths, self.seed = lengths, seed
        self._kept: tuple[int, int, NDArray[np.int64]] | None = None

    def locate(self, epoch: int, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `Order`."""
        blocks, within = np.divmod(offsets, BLOCK)
        found = np.empty_like(offsets)
        for block in np.unique(blocks):
            here = blocks == block
            found[here] = self._block(epoch, int(block))[within[here]]
        return found

    def _block(self, epoch: int, block: int) -> NDArray[np.int64]:
        if self._kept is None or self._kept[:2] != (epoch, block):
            count = len(self.lengths)
            places = np.arange(block * BLOCK, min((block + 1) * BLOCK, count), dtype=np.int64)
            samples = permute(places, count, self.seed, epoch)
            samples = samples[np.argsort(self.lengths[samples], kind="stable")]
            runs = [samples[start : start + RUN] for start in range(0, len(samples), RUN)]
            order = permute(np.arange(len(runs), dtype=np.int64), len(runs), self.seed, epoch * 2**20 + block)
            self._kept = epoch, block, np.concatenate([runs[i] for i in order])
        return self._kept[2]
