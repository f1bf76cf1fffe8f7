"""Who trains on which samples of a step: any number of processes, every sample once.

Axis legend: S samples of the global batch, R ranks.

Where R divides S, rank r reads the samples r, r + R, r + 2R, ... of the common order, as the tasks' streams
cut it. Where it does not, rank r reads a run of neighbouring ones, the first ranks one more than the last,
and passes over the others': every rank then walks through the common order. Either way a step takes the same
S samples whatever R is, and the position of the data is one number that all ranks share.
"""

from dataclasses import dataclass
from typing import Any

import torch

from tasks.base import Batch, Stream, Task
from tasks.runner.config.schema import LoopConfig


@dataclass(frozen=True)
class Split:
    """How the global batch of `total` samples is cut: over ranks, and into forward passes of `micro`."""

    total: int
    micro: int
    rank: int = 0
    world_size: int = 1

    @property
    def is_even(self) -> bool:
        """Whether all ranks have equally many samples."""
        return self.total % self.world_size == 0

    @property
    def samples(self) -> int:
        """Samples of this rank in one update."""
        return len(self.places(self.rank))

    @property
    def pieces(self) -> list[int]:
        """Sizes of this rank's micro-batches."""
        return cut(self.samples, self.micro)

    @property
    def passes(self) -> int:
        """Forward passes of one update, the same on every rank: sharded ones go in step."""
        return -(-len(self.places(0)) // self.micro)

    def places(self, rank: int) -> range:
        """Return where a rank's samples stand in the step's order."""
        if self.is_even:
            return range(rank, self.total, self.world_size)
        share, more = divmod(self.total, self.world_size)
        start = rank * share + min(rank, more)
        return range(start, start + share + (rank < more))


def cut(samples: int, micro: int) -> list[int]:
    """Return the sizes of micro-batches of at most `micro` samples."""
    full, rest = divmod(samples, micro)
    return [micro] * full + ([rest] if rest else [])


def split_batch(loop: LoopConfig, tokens_per_sample: int, world_size: int, rank: int = 0) -> Split:
    """Return how the global batch of `loop` is cut for `world_size` ranks.

    Raises:
        ValueError: tokens that are not whole samples, or fewer samples than ranks.
    """
    samples = loop.global_batch
    if loop.batch_unit == "tokens":
        samples, rest = divmod(loop.global_batch, tokens_per_sample)
        if rest or not samples:
            raise ValueError(
                f"loop.global_batch: {loop.global_batch} tokens are not a multiple of the "
                f"{tokens_per_sample} tokens of a sample; choose one that is"
            )
    if samples < world_size:
        raise ValueError(
            f"loop.global_batch: {samples} samples for {world_size} processes leave some without any; "
            f"start at most {samples} processes, or take a larger batch"
        )
    most = -(-samples // world_size)
    return Split(samples, min(loop.micro_batch or most, most), rank, world_size)


def open_stream(task: Task, split: Split) -> Stream:
    """Return the training stream of this rank."""
    if split.is_even:
        return task.stream(split.rank, split.world_size)
    return UnevenStream(task.stream(0, 1), split)


class UnevenStream:
    """A rank's samples of every step out of the stream of all ranks."""

    def __init__(self, whole: Stream, split: Split) -> None:
        self.whole, self.split = whole, split
        self.taken = 0  # samples of this rank in the step under way

    def next_batch(self, size: int) -> Batch:
        """Return the next `size` samples of this rank, which must not reach into the next step."""
        places = self.split.places(self.split.rank)
        if self.taken == 0:
            self._pass_over(places.start)
        batch = self.whole.next_batch(size)
        self.taken += size
        if self.taken == len(places):
            self._pass_over(self.split.total - places.stop)
            self.taken = 0
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position of all ranks."""
        return self.whole.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position."""
        self.whole.load_state_dict(state)
        self.taken = 0

    def _pass_over(self, samples: int) -> None:
        if samples:
            # A stream that can skip need not read what it skips.
            getattr(self.whole, "skip", self.whole.next_batch)(samples)


def whole_batch(shares: list[list[Batch]], split: Split, micro: int) -> list[Batch]:
    """Return a step's samples as one process would have read them, in its micro-batches of `micro`.

    Args:
        shares: the micro-batches of every rank, in order of ranks.

    Batches that cannot be joined, because samples have sizes of their own, come as they are.
    """
    columns = [list(zip(*share, strict=True)) for share in shares]  # of a rank: its pieces of each part
    parts = []
    for pieces in zip(*columns, strict=True):
        flat = [piece for share in pieces for piece in share]
        if len({(piece.shape[1:], piece.dtype) for piece in flat}) != 1:
            return [batch for share in shares for batch in share]
        whole = flat[0].new_empty((split.total, *flat[0].shape[1:]))
        for rank, share in enumerate(pieces):
            whole[torch.tensor(split.places(rank))] = torch.cat(share)
        parts.append(whole)
    return list(zip(*(part.split(min(micro, split.total)) for part in parts), strict=True))
