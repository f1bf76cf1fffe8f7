"""What the tasks on images with captions share: data, order, texts as tokens.

Axis legend: B pairs, C colour channels, S pixels of a side, L tokens of a text.
"""

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np

from tasks.base import Display
from tasks.multimodal.pairs import Pairs, open_pairs
from tasks.multimodal.scenes import VOCABULARY
from tasks.multimodal.vocabulary import Bytes, Vocabulary, Words
from tasks.samples.source import Sample
from tasks.samples.task import SampledTask

Encode = Callable[[Pairs, int, np.random.Generator | None], Sample]


class Encoded:
    """Pairs as samples: `encode(pairs, index, rng)` makes one."""

    def __init__(self, pairs: Pairs, encode: Encode) -> None:
        self.pairs, self.encode, self.fingerprint = pairs, encode, pairs.fingerprint

    def __len__(self) -> int:
        return len(self.pairs)

    def fetch(self, index: int, rng: np.random.Generator | None) -> Sample:
        """See `tasks.samples.source.Source`."""
        return self.encode(self.pairs, index, rng)


class PairTask(SampledTask):
    """Images with captions. Subclasses say what a sample and a batch are, and build and score the model."""

    equal_lengths = False

    def __init__(self, config: Any, train: Pairs, test: Pairs) -> None:
        super().__init__(config, Encoded(train, self.sample_of), Encoded(test, self.sample_of))
        data = config.data
        self.scenes = data.source == "scenes"
        self.vocabulary: Vocabulary = Words(VOCABULARY) if self.scenes else Bytes()
        self.channels = train.channels
        self.data_name = f"{data.source}, {len(train)} training and {len(test)} test images with captions"
        shown = train.fingerprint, test.fingerprint, self.vocabulary.name, data.image_size, data.context
        self.fingerprint = hashlib.sha256(repr(shown).encode()).hexdigest()

    @classmethod
    def open(cls, config: Any, display: Display) -> "PairTask":
        """Open the data of a run.

        Raises:
            ValueError: pairs that are not there or not as expected.
        """
        return cls(config, *open_pairs(config.data, display))

    def sample_of(self, pairs: Pairs, index: int, rng: np.random.Generator | None) -> Sample:
        """Return one sample; `rng` is None in evaluation."""
        raise NotImplementedError
