"""A seeded permutation of 0..n-1 that is computed at a point, not stored: 100 billion tokens cost nothing.

A Feistel network is a bijection of 2^(2h) numbers whatever its round function is; numbers that fall outside
0..n-1 are sent through again ("cycle walking", Black and Rogaway 2002, section 4), which keeps it a bijection
of 0..n-1. The arithmetic is fixed here to the bit, so that a run resumed under another NumPy sees the same
order.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

ROUNDS = 8
MIN_HALF_BITS = 2  # a half of one bit has too few round functions to reach every permutation


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the finaliser of SplitMix64 (Steele, Lea and Flood 2014), a bijection that mixes all bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def seeded_words(count: int, *labels: int | str) -> NDArray[np.uint64]:
    """Return `count` 64-bit words (count,) that depend on all labels, by SHAKE-256."""
    data = hashlib.shake_256(repr(labels).encode("utf-8")).digest(8 * count)
    return np.frombuffer(data, dtype="<u8").astype(np.uint64)


def permute(indices: NDArray[np.int64], n: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return where a permutation of 0..n-1, chosen by (seed, epoch), sends `indices` (K,) -> (K,).

    Raises ValueError for an index outside 0..n-1.
    """
    if len(indices) and (indices.min() < 0 or indices.max() >= n):
        raise ValueError(f"expected indices from 0 to {n - 1}, got {indices.min()} to {indices.max()}")
    half = np.uint64(max(MIN_HALF_BITS, -(-(n - 1).bit_length() // 2)))
    low = (np.uint64(1) << half) - np.uint64(1)
    keys = seeded_words(ROUNDS, "permutation", seed, epoch)

    def network(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = x >> half, x & low
        for key in keys:
            left, right = right, left ^ (_mix(right + key) & low)
        return (left << half) | right

    result = network(indices.astype(np.uint64))
    while (outside := result >= np.uint64(n)).any():
        result[outside] = network(result[outside])
    return result.astype(np.int64)
