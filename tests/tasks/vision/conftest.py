"""Small sets of images in every layout."""

import io
from types import SimpleNamespace

import numpy as np
import pytest
import webdataset
from PIL import Image

from tasks.runner.config.compose import load_config
from tasks.runner.progress import Silent
from tasks.vision.task import VisionTask

CLASSES = ("cat", "dog", "emu")


def picture(number, kind="PNG", size=12):
    """Bytes of a random image that depends on the number alone."""
    pixels = np.random.default_rng(number).integers(0, 256, (size, size, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, kind)
    return stream.getvalue()


@pytest.fixture
def folder(tmp_path):
    """Class folders, 6 images a class for training and 3 for validation."""
    for side, count in (("train", 6), ("val", 3)):
        for label, name in enumerate(CLASSES):
            place = tmp_path / "images" / side / name
            place.mkdir(parents=True)
            for number in range(count):
                (place / f"{number}.png").write_bytes(picture(100 * label + 10 * count + number))
    return tmp_path / "images"


@pytest.fixture
def shards(tmp_path):
    """Two training shards of 9 images and one of 9 for validation."""
    root = tmp_path / "shards"
    root.mkdir()
    (root / "classes.txt").write_text("".join(f"{name}\n" for name in CLASSES))
    for number, name in enumerate(("train-0.tar", "train-1.tar", "test-0.tar")):
        with webdataset.TarWriter(str(root / name)) as writer:
            for index in range(9):
                key = f"{number}{index}"
                writer.write({"__key__": key, "png": picture(int(key)), "cls": index % len(CLASSES)})
    return root


SMALL = ("model.width=16", "model.depth=2", "model.n_heads=2")
DIGITS = (*SMALL, "model.patch_size=4")
IMAGES = (*SMALL, "model.patch_size=4", "data.image_size=12")


@pytest.fixture(scope="session")
def vision():
    """How to open a task: vision("digits", "attention=sa", ...)."""

    def open_(kind="digits", *overrides):
        base = (
            ("vision/digits", *DIGITS)
            if kind == "digits"
            else ("vision/cifar10", *IMAGES, f"data.source={kind}")
        )
        config = load_config(base[0], (*base[1:], *overrides))
        return VisionTask.open(config, Silent())

    return open_


@pytest.fixture
def sides(folder, shards):
    """Where the images of a source are."""
    return SimpleNamespace(folder=folder, shards=shards)
