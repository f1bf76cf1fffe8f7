"""What keywords and transcription share: data, batches, order.

Axis legend: B recordings, T frames, M mel bands.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tasks.base import Batch, Display
from tasks.samples.buckets import Bucketed
from tasks.samples.source import Damaged
from tasks.samples.stream import SampleStream, fixed_batches
from tasks.speech.features import Frontend
from tasks.speech.recordings import Recordings
from tasks.speech.source import SpeechSource, Target, open_recordings


class SpeechTask:
    """Recordings with an encoder over them. Subclasses say what the target is and how it is scored."""

    equal_lengths = False

    kind: str  # of synthetic speech

    def __init__(self, config: Any, sides: Sequence[Recordings]) -> None:
        self.config = config
        target = self.targets(sides)
        frontend = Frontend(config.data)
        self.train, self.held_out = (SpeechSource(side, frontend, target, self.check) for side in sides)
        self.damaged = Damaged(config.data.max_damaged)
        data = config.data
        self.data_name = f"{data.source}, {len(self.train)} training and {len(self.held_out)} test recordings"
        settings = data.model_dump(include={"sample_rate", "n_mels", "window", "hop", "noise_db", "resample"})
        both = (self.train.fingerprint, self.held_out.fingerprint, settings)
        self.fingerprint = hashlib.sha256(repr(both).encode()).hexdigest()
        lengths = self.train.lengths()
        self._order = Bucketed(lengths, config.seed)
        self.tokens_per_sample = max(1, round(float(lengths.mean()) / config.model.subsample))

    @classmethod
    def open(cls, config: Any, display: Display) -> "SpeechTask":
        """Open the data of a run.

        Raises:
            ValueError: recordings that are not there or not as expected.
        """
        return cls(config, open_recordings(config.data, cls.kind, display))

    def targets(self, sides: Sequence[Recordings]) -> Target:
        """Return what turns what was said into a target."""
        raise NotImplementedError

    def check(self, frames: int, target: Any) -> None:
        """Raise ValueError where a recording of `frames` is too short for its target."""

    @property
    def data_note(self) -> str | None:
        """What a record says of recordings that were skipped."""
        return self.damaged.note()

    def stream(self, rank: int, world_size: int) -> SampleStream:
        """Return this rank's training recordings, those of like length together."""
        return SampleStream(
            self.train,
            self.collate,
            self.config.seed,
            order=self._order,
            rank=rank,
            world_size=world_size,
            workers=self.config.data.workers,
            damaged=self.damaged,
        )

    def validation(self, samples: int, batch: int) -> list[Batch]:
        """Return evenly spread test recordings, the same for every seed."""
        return list(fixed_batches(self.held_out, self.collate, samples, batch, self.damaged))

    def collate(self, samples: Sequence[tuple[Tensor, Any]]) -> Batch:
        """Return a batch: features (B, T, M) padded with zeros, lengths (B,), and targets."""
        features = pad_sequence([sample[0] for sample in samples], batch_first=True)
        lengths = torch.tensor([len(sample[0]) for sample in samples])
        return features, lengths, *self.collate_targets([sample[1] for sample in samples])

    def inputs(self, batch: Batch) -> Batch:
        """Return what the model takes of a batch."""
        return batch[:2]

    def collate_targets(self, targets: list[Any]) -> tuple[Tensor, ...]:
        """Return the targets of a batch."""
        raise NotImplementedError
