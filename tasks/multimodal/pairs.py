"""Images with captions in img2dataset's layout: webdataset shards of image, txt and json."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from tasks.base import Display
from tasks.errors import UserError
from tasks.multimodal.config import PairDataConfig
from tasks.multimodal.scenes import Scenes
from tasks.samples.order import seeded_words
from tasks.samples.seeded import seeded
from tasks.samples.shards import Shards, find_shards
from tasks.samples.source import DamagedSampleError
from tasks.vision.sources import IMAGE_EXTENSIONS

SKIN_TONES = {"1F3FB", "1F3FC", "1F3FD", "1F3FE", "1F3FF"}
PRESENTATION = "FE0F"  # asks for the coloured picture; it comes and goes with a skin tone
SMALL = 64  # pixels: smaller images are not cut for evaluation


class Pairs(Protocol):
    """Images with captions."""

    fingerprint: str
    channels: int

    def __len__(self) -> int: ...

    def pair(self, index: int, rng: np.random.Generator | None) -> tuple[Tensor, str, int]:
        """Return image (C, S, S) normalised, caption, and class or -1. Raises DamagedSampleError."""

    def prompts(self) -> list[list[str]]:
        """Return the texts that stand for each class, none where there are no classes."""


class ShardPairs:
    """Some samples of shards, decoded and transformed.

    Args:
        shards: all samples. chosen: numbers of those of this side. data: the config section.
        classes: names of classes, in order. train: whether images are augmented.
    """

    channels = 3

    def __init__(
        self, shards: Shards, chosen: Sequence[int], data: PairDataConfig, classes: list[str], *, train: bool
    ) -> None:
        self.shards, self.chosen, self.data, self.classes = shards, list(chosen), data, classes
        self.fingerprint = f"{shards.fingerprint} {self.chosen if len(chosen) < len(shards) else 'all'}"
        self.transforms = _transform(data, False), _transform(data, train)  # as it is, and augmented

    def __len__(self) -> int:
        return len(self.chosen)

    def pair(self, index: int, rng: np.random.Generator | None) -> tuple[Tensor, str, int]:
        """See `Pairs`."""
        number = self.chosen[index]
        seed = 0 if rng is None else int(rng.integers(2**31))
        try:
            files = self.shards.read(number)
            picture, text = decoded(files), caption_of(files)
            label = -1
            if self.classes:
                name = str(facts_of(files).get(self.data.class_key, ""))
                label = self.classes.index(name) if name in self.classes else -1
            with seeded(seed):
                return self.transforms[rng is not None](picture), text, label
        except UnidentifiedImageError:
            reason = "not an image"
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DamagedSampleError(self.shards.names[number], reason)

    def prompts(self) -> list[list[str]]:
        """See `Pairs`."""
        return [[prompt.format(name) for prompt in self.data.prompts] for name in self.classes]


def decoded(files: dict[str, bytes]) -> Image.Image:
    """Return a sample's image in RGB, what is transparent in white. Raises ValueError, OSError."""
    extension = next((name for name in IMAGE_EXTENSIONS if name in files), None)
    if extension is None:
        raise ValueError(f"has {', '.join(sorted(files))}; expected an image such as jpg or png")
    image = Image.open(io.BytesIO(files[extension]))
    if "transparency" in image.info or image.mode in {"RGBA", "LA", "PA"}:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")


def caption_of(files: dict[str, bytes]) -> str:
    """Return a sample's caption in single spaces. Raises ValueError where there is none."""
    if "txt" not in files:
        raise ValueError(f"has {', '.join(sorted(files))}; expected a caption, txt")
    text = " ".join(files["txt"].decode("utf-8", errors="strict").split())
    if not text:
        raise ValueError("has an empty caption")
    return text


def facts_of(files: dict[str, bytes]) -> dict[str, Any]:
    """Return a sample's json. Raises ValueError where there is none."""
    if "json" not in files:
        raise ValueError(f"has {', '.join(sorted(files))}; expected json")
    found = json.loads(files["json"])
    if not isinstance(found, dict):
        raise ValueError("its json is no object")
    return found


def emoji_base(hexcode: str) -> str:
    """Return an emoji's code points without skin tones, the same for all its variants.

    >>> emoji_base("1F9D1-1F3FB-200D-2695-FE0F")
    '1F9D1-200D-2695'
    """
    parts = hexcode.upper().split("-")
    return "-".join(part for part in parts if part not in SKIN_TONES and part != PRESENTATION)


def held_out(keys: Sequence[str], fraction: float) -> tuple[list[int], list[int]]:
    """Return the numbers of training and test samples: by a hash, equal keys on the same side."""
    limit = int(fraction * 2**64)
    sides: tuple[list[int], list[int]] = ([], [])
    for number, key in enumerate(keys):
        sides[int(seeded_words(1, "pairs", key)[0]) < limit].append(number)
    return sides


def open_pairs(data: PairDataConfig, display: Display) -> tuple[Pairs, Pairs]:
    """Return training and test pairs.

    Raises:
        UserError: data that are not there or not as expected.
    """
    if data.source == "scenes":
        return Scenes(train=True, noise=data.noise), Scenes(train=False, noise=data.noise)
    root = Path(data.path or "").expanduser()
    if not root.is_dir():
        raise UserError(f"data.path: {root} is no directory; give the one that holds the shards")
    with display.work("images and texts") as report:
        report("reading", 0.0)
        train = Shards(find_shards(root, data.train or "*.tar"))
        if data.validation:
            test = Shards(find_shards(root, data.validation))
            if {path.resolve() for path in train.paths} & {path.resolve() for path in test.paths}:
                raise UserError("data.train, data.validation: name the same shards; give others, data.train=")
            sides = list(range(len(train))), list(range(len(test)))
        else:
            test = train
            sides = held_out(_keys(train, data), data.validation_fraction)
        for shards in (train, test):
            _check_members(shards)
        for name, side in zip(("training", "test"), sides, strict=True):
            if not side:
                raise UserError(f"{root}: no {name} samples; change data.validation_fraction or the shards")
        classes = _classes(train, sides[0], data)
    return (
        ShardPairs(train, sides[0], data, classes, train=True),
        ShardPairs(test, sides[1], data, classes, train=False),
    )


def _check_members(shards: Shards) -> None:
    first = set(shards.members[0])
    if not first & set(IMAGE_EXTENSIONS) or "txt" not in first:
        raise UserError(f"{shards.names[0]}: has {', '.join(sorted(first))}; expected an image and txt")


def _keys(shards: Shards, data: PairDataConfig) -> list[str]:
    """Return what decides on which side a sample is: its caption, or its emoji without skin tone."""
    keys = []
    for number in range(len(shards)):
        try:
            files = shards.read(number)
            if data.source == "openmoji":
                keys.append(emoji_base(str(facts_of(files)["hexcode"])))
            else:
                keys.append(caption_of(files).lower())
        except KeyError as error:
            raise UserError(
                f"{shards.names[number]}: no hexcode in its json; set data.source=img2dataset"
            ) from error
        except ValueError:  # counted as damaged when it is read, if ever
            keys.append(shards.names[number])
    return keys


def _classes(shards: Shards, chosen: Sequence[int], data: PairDataConfig) -> list[str]:
    """Return the names of classes among the training samples, sorted."""
    if data.class_key is None:
        return []
    found = set()
    for number in chosen:
        try:
            found.add(str(facts_of(shards.read(number))[data.class_key]))
        except (KeyError, ValueError):
            continue
    if len(found) < 2:
        raise UserError(
            f"data.class_key: the json has {len(found)} classes under '{data.class_key}'; give another"
        )
    return sorted(found)


def _transform(data: PairDataConfig, train: bool) -> Any:
    from timm.data import create_transform

    size = data.image_size
    if not train or data.augment == "none":
        return create_transform(size, is_training=False, crop_pct=1.0 if size <= SMALL else 0.875)
    # Never mirrored: a caption may speak of left and right.
    return create_transform(
        size, is_training=True, scale=(data.crop_scale, 1.0), hflip=0.0, color_jitter=None
    )
