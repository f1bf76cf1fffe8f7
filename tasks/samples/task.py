"""What every task over two sources of samples does alike: its streams, its evaluation samples, its damage."""

from collections.abc import Sequence
from typing import Any

from tasks.samples.buckets import Order
from tasks.samples.source import Damaged, Sample, Source
from tasks.samples.stream import Batch, SampleStream, fixed_batches


class SampledTask:
    """The data side of a task. Subclasses say what a batch is, and build and score the model.

    Args:
        config: of the run; its data section has `workers` and `max_damaged`.
        train, held_out: the samples of training and of evaluation.
        order: of an epoch; a permutation by default.
    """

    def __init__(self, config: Any, train: Source, held_out: Source, order: Order | None = None) -> None:
        self.config, self.train, self.held_out = config, train, held_out
        self.order = order
        self.damaged = Damaged(config.data.max_damaged)

    @property
    def data_note(self) -> str | None:
        """What a record says of samples that were skipped."""
        return self.damaged.note()

    def stream(self, rank: int, world_size: int) -> SampleStream:
        """Return this rank's training samples in the order of the run's seed."""
        return SampleStream(
            self.train,
            self.collate_training,
            self.config.seed,
            order=self.order,
            rank=rank,
            world_size=world_size,
            workers=self.config.data.workers,
            damaged=self.damaged,
        )

    def validation(self, samples: int, batch: int) -> list[Batch]:
        """Return evenly spread samples that are held out, the same for every seed, never augmented."""
        return list(fixed_batches(self.held_out, self.collate, samples, batch, self.damaged))

    def collate(self, samples: Sequence[Sample]) -> Batch:
        """Return a batch of samples."""
        raise NotImplementedError

    def collate_training(self, samples: Sequence[Sample]) -> Batch:
        """Return a batch to train on; the same unless a task mixes samples."""
        return self.collate(samples)
