"""The embedded tier: scikit-learn's 1,797 handwritten digits, 8 x 8 pixels, grey values 0 to 16."""

import hashlib

import numpy as np
import torch
from torch import Tensor

from tasks.samples.order import seeded_words

SIZE = 8
CLASSES = 10
TEST_FRACTION = 1 / 3  # of every class: 597 images
MEAN, STD = 0.305, 0.376  # of all pixels, scaled to 0..1
MAX_SHIFT = 1  # pixels


def load_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return images (N, 8, 8) float32 in 0..1 and labels (N,) int64."""
    from sklearn.datasets import load_digits as sklearn_digits

    found = sklearn_digits()
    return (found.images / 16).astype(np.float32), found.target.astype(np.int64)


def split(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of the training and of the test images: a fixed third of every class is for test."""
    order = np.argsort(seeded_words(len(labels), "digits split"), kind="stable")
    test = []
    for label in range(CLASSES):
        own = order[labels[order] == label]
        test.append(own[: round(len(own) * TEST_FRACTION)])
    chosen = np.sort(np.concatenate(test))
    return np.setdiff1d(np.arange(len(labels)), chosen), chosen


class DigitsSource:
    """Digits of one side of the split, drawn larger where the model wants more pixels.

    Args:
        train: which side. image_size: pixels of a side, a multiple of 8. shift: move by up to a pixel.
        noise: deviation of the noise that is added, in pixels of 0 to 1; copies: how often every image is
            there. Without a generator, noise follows from the sample's number: copies of a test image differ.

    Raises:
        ValueError: another size.
    """

    def __init__(
        self,
        *,
        train: bool,
        image_size: int = SIZE,
        shift: bool = False,
        noise: float = 0.0,
        copies: int = 1,
    ) -> None:
        if image_size % SIZE:
            raise ValueError(
                f"data.image_size: digits have {SIZE} pixels a side, expected a multiple, got {image_size}"
            )
        images, labels = load_digits()
        chosen = split(labels)[0 if train else 1]
        self.images, self.labels = images[chosen], labels[chosen]
        self.zoom, self.shift, self.noise, self.copies = image_size // SIZE, shift, noise, copies
        how = repr((noise, copies)).encode() if noise or copies > 1 else b""
        self.fingerprint = hashlib.sha256(self.images.tobytes() + self.labels.tobytes() + how).hexdigest()

    def __len__(self) -> int:
        return len(self.labels) * self.copies

    def fetch(self, index: int, rng: np.random.Generator | None) -> tuple[Tensor, int, int]:
        """Return image (1, S, S) normalised, label, and a number for what mixes the batch."""
        draw = rng or np.random.Generator(np.random.PCG64(seeded_words(2, "digits noise", index)))
        number = index % len(self.labels)
        image, mix = self.images[number], 0
        if rng is not None:
            if self.shift:
                image = shifted(image, *rng.integers(-MAX_SHIFT, MAX_SHIFT + 1, 2))
            mix = int(rng.integers(2**31))
        if self.noise:
            image = image + self.noise * draw.standard_normal(image.shape)
        large = np.kron((image - MEAN) / STD, np.ones((self.zoom, self.zoom), np.float32))
        return torch.from_numpy(large.astype(np.float32))[None], int(self.labels[number]), mix


def shifted(image: np.ndarray, down: int, right: int) -> np.ndarray:
    """Return the image (S, S) moved by whole pixels; what comes in is empty."""
    size = len(image)
    moved = np.zeros_like(image)
    moved[max(down, 0) : size + min(down, 0), max(right, 0) : size + min(right, 0)] = image[
        max(-down, 0) : size + min(-down, 0), max(-right, 0) : size + min(-right, 0)
    ]
    return moved
