"""The embedded tier: one to three handwritten digits on a canvas, with a caption and questions.

The canvas has four places, two by two. Scene i of a side is a function of i alone: no seed changes it, and a
run over other scenes is another data set. Training scenes show training digits, test scenes test digits
(scikit-learn's, split as for image classification). A scene has exactly one caption, which tells everything
that is asked: how many digits, which, where and in which order, row by row.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tasks.samples.order import seeded_words
from tasks.vision.digits import MEAN, STD, load_digits, split
from tasks.vision.digits import SIZE as DIGIT

PLACE = 10  # pixels of a side of a place: a digit, and two to move it in
SIZE = 2 * PLACE
TRAIN, TEST = 20_000, 2_000  # scenes of the sides
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PLACES = ("top-left", "top-right", "bottom-left", "bottom-right")
# Of two places in reading order: how the first one lies to the second.
RELATIONS = {
    (0, 1): "left of",
    (2, 3): "left of",
    (0, 2): "above",
    (1, 3): "above",
    (0, 3): "above and left of",
    (1, 2): "above and right of",
}
VOCABULARY = (
    *NAMES, *PLACES, ":", ",", "?", "a", "above", "and", "are", "at", "comes", "digit", "digits", "first",
    "how", "is", "largest", "last", "left", "many", "none", "of", "right", "smallest", "the", "there",
    "where", "which",
)  # fmt: skip
# What a question can be answered with, by its kind.
CANDIDATES = {
    "which": (*NAMES, "none"),
    "where": PLACES,
    "count": NAMES[:4],
    "order": NAMES,
}
KINDS = tuple(CANDIDATES)
ORDERS = {
    "comes first": lambda digits: digits[0],
    "comes last": lambda digits: digits[-1],
    "is the largest": max,
    "is the smallest": min,
}


@dataclass(frozen=True)
class Layout:
    """What stands where, in reading order.

    `places` are numbers of PLACES, `digits` their values, `pictures` the numbers of the handwritten digits on
    their side of the split, `corners` the pixel of each one's upper left corner.
    """

    places: tuple[int, ...]
    digits: tuple[int, ...]
    pictures: tuple[int, ...]
    corners: tuple[tuple[int, int], ...]


def caption(layout: Layout) -> str:
    """Return the one caption of a scene.

    One digit is told with its place; two with the place of the first and how it lies to the second; three in
    reading order with the place that is empty.
    """
    names = [f"a {NAMES[digit]}" for digit in layout.digits]
    first = PLACES[layout.places[0]]
    if len(names) == 1:
        return f"one digit: {names[0]} at the {first}"
    if len(names) == 2:
        relation = RELATIONS[layout.places[0], layout.places[1]]
        return f"two digits: {names[0]} at the {first}, {relation} {names[1]}"
    (empty,) = set(range(len(PLACES))) - set(layout.places)
    return f"three digits: {names[0]}, {names[1]} and {names[2]}, none at the {PLACES[empty]}"


@dataclass(frozen=True)
class Question:
    """A question, its kind (a key of CANDIDATES) and its answer, one of the candidates."""

    text: str
    kind: str
    answer: str


def question(layout: Layout, draws: NDArray[np.uint64]) -> Question:
    """Return a question about a scene, chosen by four numbers.

    Three in four questions about a place are about one with a digit; where a digit stands is asked of one
    that is there once.
    """
    kind, first, second, third = (int(draw) for draw in draws)
    once = [number for number, digit in enumerate(layout.digits) if layout.digits.count(digit) == 1]
    match KINDS[kind % len(KINDS)]:
        case "where" if once:
            number = once[first % len(once)]
            asked = f"where is the {NAMES[layout.digits[number]]}?"
            return Question(asked, "where", PLACES[layout.places[number]])
        case "count":
            if first % 2:
                return Question("how many digits are there?", "count", NAMES[len(layout.digits)])
            value = layout.digits[second % len(layout.digits)] if third % 2 else second % len(NAMES)
            asked = f"how many digits are {NAMES[value]}?"
            return Question(asked, "count", NAMES[layout.digits.count(value)])
        case "order":
            which = list(ORDERS)[first % len(ORDERS)]
            return Question(f"which digit {which}?", "order", NAMES[ORDERS[which](layout.digits)])
    place = layout.places[first % len(layout.places)] if second % 4 else third % len(PLACES)
    there = dict(zip(layout.places, layout.digits, strict=True))
    answer = NAMES[there[place]] if place in there else "none"
    return Question(f"which digit is at the {PLACES[place]}?", "which", answer)


class Scenes:
    """One side of the set.

    Args:
        train: which side. noise: deviation of normal noise on pixels, digits being 0 to 1.
    """

    channels = 1

    def __init__(self, *, train: bool, noise: float = 0.0) -> None:
        images, labels = load_digits()
        chosen = split(labels)[0 if train else 1]
        self.images, self.labels = images[chosen], labels[chosen]
        self.side, self.noise = "train" if train else "test", noise
        self.count = TRAIN if train else TEST
        # All that a scene can be made of, and some scenes as they are made.
        digest = hashlib.sha256(self.images.tobytes() + self.labels.tobytes())
        digest.update(repr([self.layout(number) for number in range(16)]).encode())
        digest.update(repr((self.side, self.count, noise)).encode())
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return self.count

    def layout(self, index: int) -> Layout:
        """Return what stands where in scene `index`."""
        count, *draws = seeded_words(14, "scene", self.side, index)
        number = 1 + int(count) % 3
        places = sorted(np.argsort(draws[:4], kind="stable")[:number].tolist())
        pictures = [int(draw) % len(self.labels) for draw in draws[4 : 4 + number]]
        moves = [int(draw) % (PLACE - DIGIT + 1) for draw in draws[7:13]]
        corners = [
            (place // 2 * PLACE + moves[2 * n], place % 2 * PLACE + moves[2 * n + 1])
            for n, place in enumerate(places)
        ]
        digits = [int(self.labels[picture]) for picture in pictures]
        return Layout(tuple(places), tuple(digits), tuple(pictures), tuple(corners))

    def picture(self, layout: Layout, index: int, rng: np.random.Generator | None) -> Tensor:
        """Return the normalised canvas (1, S, S) float32; noise of an evaluation is always the same."""
        canvas = np.zeros((SIZE, SIZE), np.float32)
        for picture, (top, left) in zip(layout.pictures, layout.corners, strict=True):
            canvas[top : top + DIGIT, left : left + DIGIT] = self.images[picture]
        if self.noise:
            rng = rng or np.random.Generator(np.random.PCG64(seeded_words(2, "scene noise", index)))
            canvas += self.noise * rng.standard_normal(canvas.shape, np.float32)
        return torch.from_numpy((canvas - np.float32(MEAN)) / np.float32(STD))[None]

    def pair(self, index: int, rng: np.random.Generator | None) -> tuple[Tensor, str, int]:
        """Return canvas, caption, and the digit of a scene that has one only, else -1."""
        layout = self.layout(index)
        label = layout.digits[0] if len(layout.digits) == 1 else -1
        return self.picture(layout, index, rng), caption(layout), label

    def question(self, index: int, rng: np.random.Generator | None) -> Question:
        """Return a question about scene `index`: any of them by `rng`, always the same one without."""
        draws = seeded_words(4, "question", self.side, index) if rng is None else rng.integers(2**31, size=4)
        return question(self.layout(index), draws)

    def prompts(self) -> list[list[str]]:
        """Return what each digit is called, for classification by captions: at any place."""
        return [[f"one digit: a {name} at the {place}" for place in PLACES] for name in NAMES]
