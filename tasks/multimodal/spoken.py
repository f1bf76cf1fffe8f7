"""Pairs of a handwritten digit and a spoken one, which one sees and hears; their sum is asked.

Pair i of a side is a function of i: digits are drawn independently, so what is seen says nothing of what is
heard, and neither alone gives the sum. Images of the test side are scikit-learn's test digits; voices of the
test side are those of the speech tasks'.
"""

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tasks.base import Display
from tasks.errors import UserError
from tasks.multimodal.config import FusionDataConfig
from tasks.samples.order import seeded_words
from tasks.speech.features import Frontend
from tasks.speech.recordings import Recordings
from tasks.speech.source import SpeechSource, open_recordings
from tasks.speech.synthetic import DIGITS
from tasks.vision.digits import MEAN, STD, load_digits, split

CLASSES = 2 * 9 + 1  # sums of two digits


class DigitPairs:
    """One side of the set.

    Args:
        data: the config section. recordings: of this side. train: which side.

    Raises:
        UserError: recordings of which none says a digit.
    """

    def __init__(self, data: FusionDataConfig, recordings: Recordings, *, train: bool) -> None:
        images, labels = load_digits()
        chosen = split(labels)[0 if train else 1]
        self.images, self.labels = images[chosen], labels[chosen]
        self.speech = SpeechSource(recordings, Frontend(data.speech()), digit_of, _any_length)
        self.side, self.noise = "train" if train else "test", data.noise
        self.count = data.train_pairs if train else data.test_pairs
        digest = hashlib.sha256(self.images.tobytes() + self.labels.tobytes())
        digest.update(repr((recordings.fingerprint, self.side, self.count, self.noise)).encode())
        digest.update(repr([self.places(number) for number in range(16)]).encode())
        self.fingerprint = digest.hexdigest()
        try:
            digit_of(recordings.said(0))
        except ValueError as error:
            raise UserError(f"{recordings.name(0)}: {error}") from error

    def __len__(self) -> int:
        return self.count

    def places(self, index: int) -> tuple[int, int]:
        """Return which image and which recording pair `index` is of."""
        image, recording = seeded_words(2, "digit pair", self.side, index)
        return int(image) % len(self.labels), int(recording) % len(self.speech)

    def fetch(self, index: int, rng: np.random.Generator | None) -> tuple[Tensor, Tensor, int]:
        """Return image (1, 8, 8) normalised, features (T, M) and the sum.

        Noise of an evaluation is the same at every call. Raises DamagedSampleError.
        """
        image, recording = self.places(index)
        features, said = self.speech.fetch(recording, rng)
        pixels = self.images[image]
        if self.noise:
            rng = rng or np.random.Generator(np.random.PCG64(seeded_words(2, "digit noise", index)))
            pixels = pixels + np.float32(self.noise) * rng.standard_normal(pixels.shape, np.float32)
        seen = torch.from_numpy((pixels - np.float32(MEAN)) / np.float32(STD))[None]
        return seen, features, int(self.labels[image]) + said

    def lengths(self) -> np.ndarray:
        """Return spectra of every pair (N,)."""
        own = self.speech.lengths()
        return own[[self.places(index)[1] for index in range(self.count)]]


def digit_of(said: str) -> int:
    """Return the digit that was said, as a word or a number. Raises ValueError for anything else."""
    if said in DIGITS:
        return DIGITS.index(said)
    if len(said) == 1 and "0" <= said <= "9":
        return int(said)
    raise ValueError(f"'{said}' is no digit; expected recordings of zero to nine")


def _any_length(frames: int, target: Any) -> None:
    """A sum fits any length."""


def open_digit_pairs(data: FusionDataConfig, display: Display) -> tuple[DigitPairs, DigitPairs]:
    """Return training and test pairs.

    Raises:
        UserError: recordings that are not there, not as expected, or at another rate.
    """
    train, test = open_recordings(data.speech(), "digits", display)
    return DigitPairs(data, train, train=True), DigitPairs(data, test, train=False)
