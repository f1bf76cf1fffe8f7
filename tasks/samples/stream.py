"""Training batches of a source: in a seeded order, disjoint between ranks, restartable anywhere.

Axis legend: B samples of a batch.

All ranks walk one endless order of places: epoch e visits every sample once, in an order chosen by (seed, e).
Rank r of R takes the places r, r + R, r + 2R, ... So the state is one number, ranks never share a
sample within an epoch, and together they leave none out. Worker processes read ahead in chunks that are
handed out in turn; how many there are changes nothing about the order or the content.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tasks.errors import UserError
from tasks.samples.buckets import Order, Shuffled
from tasks.samples.source import Damaged, DamagedSampleError, Sample, Source, sample_rng

CHUNK = 16  # places a worker reads at a time: few enough to start soon, enough to pay for the hand-over
Batch = tuple[Tensor, ...]
Collate = Callable[[Sequence[Sample]], Batch]
Read = Sample | DamagedSampleError


class _Chunks(IterableDataset):
    """An endless sequence of chunks of read places; worker w of W reads the chunks w, w + W, ..."""

    def __init__(
        self, source: Source, order: Order, seed: int, first: int, rank: int, world_size: int
    ) -> None:
        self.source, self.order, self.seed, self.first = source, order, seed, first
        self.rank, self.world_size = rank, world_size

    def __iter__(self) -> Iterator[list[Read]]:
        info = get_worker_info()
        chunk, step = (info.id, info.num_workers) if info else (0, 1)
        while True:
            own = self.first + chunk * CHUNK + np.arange(CHUNK, dtype=np.int64)
            yield [self._read(*place) for place in zip(*self._located(own), strict=True)]
            chunk += step

    def _located(self, own: np.ndarray) -> tuple[list[int], list[int]]:
        """Return epochs and sample numbers of this rank's places `own` (CHUNK,)."""
        epochs, offsets = np.divmod(own * self.world_size + self.rank, len(self.source))
        indices = np.empty_like(offsets)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            indices[here] = self.order.locate(int(epoch), offsets[here])
        return epochs.tolist(), indices.tolist()

    def _read(self, epoch: int, index: int) -> Read:
        try:
            return self.source.fetch(index, sample_rng(self.seed, epoch, index))
        except DamagedSampleError as error:
            return error


class SampleStream:
    """Training batches of one rank.

    Args:
        source: the samples.
        collate: makes a batch of samples.
        seed: of order and augmentation.
        order: of an epoch; a permutation by default.
        workers: processes that read ahead; 0 reads when asked.
        damaged: counts what cannot be read; such a place is passed over.

    Raises:
        UserError: an empty source.
        ValueError: an impossible rank.
    """

    def __init__(
        self,
        source: Source,
        collate: Collate,
        seed: int,
        *,
        order: Order | None = None,
        rank: int = 0,
        world_size: int = 1,
        workers: int = 0,
        damaged: Damaged | None = None,
    ) -> None:
        if not len(source):
            raise UserError("there are no training samples; give data that has some")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank} of {world_size}, expected 0 <= rank < world_size")
        self.source, self.collate, self.seed = source, collate, seed
        self.order = order or Shuffled(len(source), seed)
        self.rank, self.world_size, self.workers = rank, world_size, workers
        self.damaged = damaged or Damaged(0)
        self._taken = 0  # places this rank has passed
        self._ahead: deque[Read] = deque()
        self._reader: Iterator[list[Read]] | None = None

    def next_batch(self, size: int) -> Batch:
        """Return the next `size` samples that can be read. Raises UserError when too many cannot."""
        samples: list[Sample] = []
        passed = 0
        while len(samples) < size:
            read = self._next()
            self._taken += 1
            if isinstance(read, DamagedSampleError):
                passed += 1
                self.damaged.add(read)
                if passed >= len(self.source):
                    raise UserError(f"no sample can be read ({self.damaged.names()}); repair the data")
            else:
                passed = 0
                samples.append(read)
        return self.collate(samples)

    @property
    def epoch(self) -> float:
        """How many times the samples have been gone through, by all ranks together."""
        return self._taken * self.world_size / len(self.source)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, in places of all ranks, what it is a position in, and what was passed over."""
        return {
            "places": self._taken * self.world_size,
            "samples": len(self.source),
            "seed": self.seed,
            "damaged": dict(self.damaged.found),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position, also with another number of ranks that divides it.

        Raises UserError for a state of other data or another seed, or a position ranks cannot share.
        """
        for name, value in (("samples", len(self.source)), ("seed", self.seed)):
            if state.get(name) != value:
                raise UserError(
                    f"the saved data position has {name} {state.get(name)}, expected {value}; "
                    "resume with the data settings it was saved with"
                )
        if state["places"] < 0 or state["places"] % self.world_size:
            raise UserError(
                f"the saved data position, {state['places']} samples, cannot be shared by {self.world_size} "
                "ranks; resume with a number of ranks that divides it"
            )
        self._taken = state["places"] // self.world_size
        self.damaged.found.update(state["damaged"])
        self._ahead.clear()
        self._reader = None

    def _next(self) -> Read:
        if not self._ahead:
            if self._reader is None:
                self._reader = self._open()
            self._ahead.extend(next(self._reader))
        return self._ahead.popleft()

    def _open(self) -> Iterator[list[Read]]:
        place = self.seed, self._taken, self.rank, self.world_size
        chunks = _Chunks(self.source, self.order, *place)
        if not self.workers:
            return iter(chunks)
        # One thread each: the training step has the cores.
        return iter(
            DataLoader(
                chunks,
                batch_size=None,
                num_workers=self.workers,
                worker_init_fn=_one_thread,
                prefetch_factor=4,
            )
        )


def _one_thread(_: int) -> None:
    torch.set_num_threads(1)


def fixed_batches(
    source: Source, collate: Collate, samples: int, size: int, damaged: Damaged | None = None
) -> Iterable[Batch]:
    """Yield evaluation batches: the same samples at every call, spread evenly over the source, none twice.

    Raises UserError for an empty source, or when more samples than allowed cannot be read.
    """
    if not len(source):
        raise UserError("there are no validation samples; give data that has some")
    damaged = damaged or Damaged(0)
    chosen = min(samples, len(source))
    read: list[Sample] = []
    for index in np.arange(chosen, dtype=np.int64) * len(source) // chosen:
        try:
            read.append(source.fetch(int(index), None))
        except DamagedSampleError as error:
            damaged.add(error)
        if len(read) == size:
            yield collate(read)
            read = []
    if read:
        yield collate(read)
