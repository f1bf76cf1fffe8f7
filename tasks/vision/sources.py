"""Images with labels: CIFAR-10 as torchvision keeps it, folders of classes, webdataset shards."""

import hashlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from tasks.errors import UserError
from tasks.samples.seeded import seeded
from tasks.samples.shards import Shards, find_shards
from tasks.samples.source import DamagedSampleError, Source
from tasks.vision.config import VisionDataConfig
from tasks.vision.digits import CLASSES, DigitsSource
from tasks.vision.transforms import Transform, build_transforms

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm"}
IMAGE_EXTENSIONS = tuple(sorted(suffix[1:] for suffix in SUFFIXES))


class Pictures(Protocol):
    """Undecoded images with labels."""

    fingerprint: str

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """Return what a message calls the image."""

    def picture(self, index: int) -> tuple[Any, int]:
        """Return a PIL image or a file that holds one, and its label."""


class ImageSource:
    """Pictures, decoded and transformed."""

    def __init__(self, pictures: Pictures, transform: Transform, classes: int) -> None:
        self.pictures, self.transform, self.classes = pictures, transform, classes
        self.fingerprint = pictures.fingerprint

    def __len__(self) -> int:
        return len(self.pictures)

    def fetch(self, index: int, rng: np.random.Generator | None) -> tuple[Tensor, int, int]:
        """Return image (3, S, S) normalised, label, and a number for what mixes the batch."""
        image, label = self._decoded(index)
        if not 0 <= label < self.classes:
            raise DamagedSampleError(
                self.pictures.name(index),
                f"label {label}, expected 0 to {self.classes - 1}",
            )
        seed, mix = (0, 0) if rng is None else map(int, rng.integers(2**31, size=2))
        with seeded(seed):
            return self.transform(image), label, mix

    def _decoded(self, index: int) -> tuple[Image.Image, int]:
        try:
            found, label = self.pictures.picture(index)
            image = found if isinstance(found, Image.Image) else Image.open(found)
            return image.convert("RGB"), label
        except UnidentifiedImageError:
            reason = "not an image"
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DamagedSampleError(self.pictures.name(index), reason)


class ArrayPictures:
    """Images in memory, (N, S, S, 3) uint8."""

    def __init__(self, images: np.ndarray, labels: list[int]) -> None:
        self.images, self.labels = images, labels
        self.fingerprint = hashlib.sha256(images.tobytes() + bytes(labels)).hexdigest()

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        """Return the image's number."""
        return f"image {index}"

    def picture(self, index: int) -> tuple[Image.Image, int]:
        """Return the image and its label."""
        return Image.fromarray(self.images[index]), self.labels[index]


class FolderPictures:
    """One folder per class, their sorted names being classes 0, 1, ...: ImageNet's layout.

    Raises UserError for a folder that is not there, has no class folders or a class without an image.
    """

    def __init__(self, root: Path, classes: list[str] | None = None) -> None:
        if not root.is_dir():
            raise UserError(f"{root}: no such folder; expected one folder per class in it")
        self.root = root
        found = sorted(entry.name for entry in root.iterdir() if entry.is_dir() and entry.name[0] != ".")
        if not found:
            raise UserError(f"{root}: no class folders; expected CLASS/IMAGE.jpg and the like")
        if classes is not None and found != classes:
            odd = sorted(set(found) ^ set(classes))
            raise UserError(f"{root}: other classes than the training images ({', '.join(odd[:3])})")
        self.classes = found
        self.files: list[tuple[str, int]] = []
        for label, name in enumerate(found):
            own = sorted(
                str(path.relative_to(root))
                for path in (root / name).rglob("*")
                if path.suffix.lower() in SUFFIXES and path.is_file()
            )
            if not own:
                raise UserError(
                    f"{root / name}: no images; expected files such as {', '.join(sorted(SUFFIXES))}"
                )
            self.files += [(path, label) for path in own]
        sizes = [(root / path).stat().st_size for path, _ in self.files]
        self.fingerprint = hashlib.sha256(repr((self.files, sizes)).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self.files)

    def name(self, index: int) -> str:
        """Return the path below the folder."""
        return self.files[index][0]

    def picture(self, index: int) -> tuple[Path, int]:
        """Return the file and its label."""
        path, label = self.files[index]
        return self.root / path, label


class ShardPictures:
    """Webdataset samples with an image and a `cls` (the class's number in ASCII)."""

    def __init__(self, paths: list[Path]) -> None:
        self.shards = Shards(paths)
        self.fingerprint = self.shards.fingerprint
        first = set(self.shards.members[0])
        if not first & set(IMAGE_EXTENSIONS) or "cls" not in first:
            raise UserError(
                f"{self.shards.names[0]}: has {', '.join(sorted(first))}; expected an image and cls"
            )

    def __len__(self) -> int:
        return len(self.shards)

    def name(self, index: int) -> str:
        """Return shard and key."""
        return self.shards.names[index]

    def picture(self, index: int) -> tuple[io.BytesIO, int]:
        """Return the image's bytes and its label."""
        files = self.shards.read(index)
        extension = next((name for name in IMAGE_EXTENSIONS if name in files), None)
        if extension is None or "cls" not in files:
            raise ValueError(f"has {', '.join(sorted(files))}; expected an image and cls")
        return io.BytesIO(files[extension]), int(files["cls"])


def open_sources(data: VisionDataConfig) -> tuple[Source, Source, int, int]:
    """Return training and validation images, the number of classes and of colour channels.

    Raises:
        UserError, ValueError: data that are not there or not as expected.
    """
    if data.source == "digits":
        common = {"image_size": data.image_size, "noise": data.noise}
        train = DigitsSource(train=True, shift=data.augment == "shift", **common)
        return train, DigitsSource(train=False, copies=data.test_copies, **common), CLASSES, 1
    transforms = build_transforms(data)
    root = Path(data.path or "").expanduser()
    if not root.is_dir():
        raise UserError(f"data.path: {root} is no directory; give the one that holds the images")
    pictures, classes = OPENERS[data.source](data, root)
    sides = [
        ImageSource(own, transform, classes) for own, transform in zip(pictures, transforms, strict=True)
    ]
    return sides[0], sides[1], classes, 3


def open_cifar10(data: VisionDataConfig, root: Path) -> tuple[list[Pictures], int]:
    """Open what torchvision's CIFAR10 unpacks; its checksums are compared before anything is unpickled."""
    from torchvision.datasets import CIFAR10

    try:
        sides = [CIFAR10(str(root), train=train, download=False) for train in (True, False)]
    except (RuntimeError, OSError) as error:
        raise UserError(
            f"{root}: not torchvision's CIFAR-10, or damaged; expected a whole cifar-10-batches-py in it"
        ) from error
    return [ArrayPictures(side.data, side.targets) for side in sides], 10


def open_folder(data: VisionDataConfig, root: Path) -> tuple[list[Pictures], int]:
    """Open root/train/CLASS/... and root/val/CLASS/..."""
    train = FolderPictures(root / (data.train or "train"))
    return [train, FolderPictures(root / (data.validation or "val"), train.classes)], len(train.classes)


def open_shards(data: VisionDataConfig, root: Path) -> tuple[list[Pictures], int]:
    """Open webdataset shards; `classes.txt` beside them has a line per class."""
    names = root / "classes.txt"
    classes = data.classes
    if classes is None and not names.is_file():
        raise UserError(f"{root}: no classes.txt says how many classes there are; add data.classes=N")
    if classes is None:
        classes = len([line for line in names.read_text(encoding="utf-8").splitlines() if line.strip()])
    patterns = data.train or "train-*.tar", data.validation or "test-*.tar"
    return [ShardPictures(find_shards(root, pattern)) for pattern in patterns], classes


OPENERS: dict[str, Callable[[VisionDataConfig, Path], tuple[list[Pictures], int]]] = {
    "cifar10": open_cifar10,
    "folder": open_folder,
    "shards": open_shards,
}
