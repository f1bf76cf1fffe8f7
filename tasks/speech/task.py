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
from tasks.samples.task import SampledTask
from tasks.speech.features import Frontend
from tasks.speech.recordings import Recordings
from tasks.speech.source import SpeechSource, Target, open_recordings


class SpeechTask(SampledTask):
    """Recordings with an encoder over them. Subclasses say what the target is and how it is scored."""

    equal_lengths = False

    kind: str  # of synthetic speech

    def __init__(self, config: Any, sides: Sequence[Recordings]) -> None:
        data = config.data
        self.config = config  # the targets depend on it
        target, frontend = self.targets(sides), Frontend(data)
        train, held_out = (SpeechSource(side, frontend, target, self.check) for side in sides)
        lengths = train.lengths()
        super().__init__(config, train, held_out, Bucketed(lengths, config.seed))
        self.data_name = f"{data.source}, {len(self.train)} training and {len(self.held_out)} test recordings"
        settings = data.model_dump(include={"sample_rate", "n_mels", "window", "hop", "noise_db", "resample"})
        both = (self.train.fingerprint, self.held_out.fingerprint, settings)
        self.fingerprint = hashlib.sha256(repr(both).encode()).hexdigest()
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
