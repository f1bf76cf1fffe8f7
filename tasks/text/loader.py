"""Windows of tokens in a seeded order, restartable anywhere, disjoint between ranks.

Axis legend: B windows of a batch, T positions of a window, N tokens.

An epoch cuts the tokens into consecutive windows of T inputs, from a start that the epoch chooses, and visits
each once in a permuted order; the next epoch cuts elsewhere. Which window is the i-th is a pure function of
(seed, epoch, i), so the whole state of a loader is one number: how many windows all ranks have taken.
"""

import hashlib
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tasks.errors import UserError
from tasks.samples.order import permute, seeded_words

Batch = tuple[Tensor, Tensor]  # inputs and targets, (B, T) int64 each


class TokenSequence(Protocol):
    """Tokens on disk or in memory: an array, a memory map or `shards.TokenShards`."""

    def __len__(self) -> int: ...

    def __getitem__(self, key: slice, /) -> NDArray[Any]: ...


class TokenWindows:
    """Training batches of windows.

    Rank r of R takes the windows r, r + R, r + 2R, ... of the common order. So ranks never share a window
    within an epoch, and as long as all take equally many, the windows taken so far do not depend on R.
    """

    def __init__(
        self, tokens: TokenSequence, seq_len: int, seed: int, *, rank: int = 0, world_size: int = 1
    ) -> None:
        """Open the order of `tokens` (N,) cut into windows of `seq_len` inputs and as many targets.

        Raises UserError for fewer tokens than one window needs, ValueError for an impossible rank.
        """
        _require_window(tokens, seq_len)
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank} of {world_size}, expected 0 <= rank < world_size")
        self.tokens, self.seq_len, self.seed = tokens, seq_len, seed
        self.rank, self.world_size = rank, world_size
        # One window's worth of tokens is given up so that every epoch may start its cuts anywhere in 0..T-1
        # and all epochs have equally many windows.
        self.windows_per_epoch = max(1, (len(tokens) - seq_len) // seq_len)
        self._slack = min(seq_len - 1, len(tokens) - 1 - self.windows_per_epoch * seq_len)
        self._taken = 0  # windows this rank has taken

    def starts(self, epoch: int, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the first token of the windows at places `indices` (K,) of an epoch's order -> (K,)."""
        phase = int(seeded_words(1, "phase", self.seed, epoch)[0]) % (self._slack + 1)
        return phase + self.seq_len * permute(indices, self.windows_per_epoch, self.seed, epoch)

    def next_starts(self, batch_size: int) -> NDArray[np.int64]:
        """Return where the next windows of this rank start (B,) and move on. Raises ValueError below one."""
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}, expected at least 1")
        places = (self._taken + np.arange(batch_size, dtype=np.int64)) * self.world_size + self.rank
        epochs, indices = np.divmod(places, self.windows_per_epoch)
        starts = np.empty_like(places)
        for epoch in np.unique(epochs):
            starts[epochs == epoch] = self.starts(int(epoch), indices[epochs == epoch])
        self._taken += batch_size
        return starts

    def next_batch(self, batch_size: int) -> Batch:
        """Return the next inputs (B, T) and targets (B, T), the tokens one place on, as int64."""
        return gather(self.tokens, self.next_starts(batch_size), self.seq_len)

    @property
    def epoch(self) -> float:
        """How many times the tokens have been gone through, by all ranks together."""
        return self._taken * self.world_size / self.windows_per_epoch

    def state_dict(self) -> dict[str, int]:
        """Return the position, in windows of all ranks, and what it is a position in."""
        return {"windows": self._taken * self.world_size, **self._identity()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from a position, also with another number of ranks.

        Raises UserError for a state of other tokens, window length or seed, and for a position that the
        ranks cannot share evenly.
        """
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise UserError(
                    f"the saved data position has {name} {state.get(name)}, expected {value}; "
                    "resume with the data settings it was saved with"
                )
        windows = state["windows"]
        if windows < 0 or windows % self.world_size:
            raise UserError(
                f"the saved data position, {windows} windows, cannot be shared by {self.world_size} ranks; "
                "resume with a number of ranks that divides it"
            )
        self._taken = windows // self.world_size

    def _identity(self) -> dict[str, int]:
        return {"tokens": len(self.tokens), "seq_len": self.seq_len, "seed": self.seed}


def validation_windows(tokens: TokenSequence, seq_len: int, samples: int, batch_size: int) -> Iterator[Batch]:
    """Yield evaluation batches: the same windows at every call, spread evenly over all tokens, none twice.

    They come in order, `samples` of them or all there are; the last batch may be smaller. Raises UserError
    for fewer tokens than one window needs.
    """
    starts = validation_starts(tokens, seq_len, samples)
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}, expected at least 1")
    return (gather(tokens, starts[i : i + batch_size], seq_len) for i in range(0, len(starts), batch_size))


def validation_starts(tokens: TokenSequence, seq_len: int, samples: int) -> NDArray[np.int64]:
    """Return where the evaluation windows start, (min(samples, all there are),), rising."""
    _require_window(tokens, seq_len)
    if samples < 1:
        raise ValueError(f"{samples} evaluation windows were asked for, expected at least 1")
    available = (len(tokens) - 1) // seq_len
    chosen = min(samples, available)
    return np.arange(chosen, dtype=np.int64) * available // chosen * seq_len


def gather(tokens: TokenSequence, starts: NDArray[np.int64], seq_len: int) -> Batch:
    """Return inputs and targets, each (B, T) int64, of the windows at `starts` (B,); only they are read."""
    both = np.empty((len(starts), seq_len + 1), dtype=np.int64)
    for row, start in zip(both, starts.tolist(), strict=True):
        row[:] = tokens[start : start + seq_len + 1]
    whole = torch.from_numpy(both)
    return whole[:, :-1].contiguous(), whole[:, 1:].contiguous()


def batch_hash(*arrays: Tensor | NDArray[Any]) -> str:
    """Return the sha256 of a batch's shapes and values, whatever holds them (NumPy, torch on any device).

    Two runs that print equal hashes for every batch saw the same data in the same order.
    """
    digest = hashlib.sha256()
    for array in arrays:
        values = array.numpy(force=True) if isinstance(array, Tensor) else array
        values = np.ascontiguousarray(values, dtype="<i8")
        digest.update(repr(values.shape).encode("ascii"))
        digest.update(values.tobytes())
    return digest.hexdigest()


def _require_window(tokens: TokenSequence, seq_len: int) -> None:
    if seq_len < 1:
        raise ValueError(f"seq_len is {seq_len}, expected at least 1")
    if len(tokens) < seq_len + 1:
        raise UserError(
            f"{len(tokens)} tokens are too few for one window, expected seq_len + 1 = {seq_len + 1} or more; "
            "use more text or a shorter seq_len"
        )
