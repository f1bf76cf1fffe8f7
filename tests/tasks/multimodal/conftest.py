"""Small sets of images with captions, and how to open the tasks on them."""

import io
import json

import numpy as np
import pytest
import webdataset
from PIL import Image

from tasks.runner.config.compose import load_config
from tasks.runner.progress import Silent
from tasks.runner.registry import load_task
from tasks.speech import synthetic

STACK = ("model.n_layers=2", "model.d_model=16", "model.n_heads=2")
TOWERS = (
    "model.image.width=16", "model.image.depth=2", "model.image.n_heads=2", "model.text.n_layers=2",
    "model.text.d_model=16", "model.text.n_heads=2", "model.width=8",
)  # fmt: skip
SMALL = {
    "scenes_contrastive": TOWERS,
    "openmoji": TOWERS,
    "img2dataset": TOWERS,
    "scenes_captions": STACK,
    "spoken_digits": STACK,
}
SHARDS = (
    "data.image_size=16", "model.image.patch_size=8", "data.context=24", "data.workers=0",
    "data.validation_fraction=0.3",
)  # fmt: skip


def picture(number, mode="RGB", size=16):
    """Bytes of a random PNG that depends on the number alone."""
    pixels = np.random.default_rng(number).integers(0, 256, (size, size, len(mode)), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels, mode).save(stream, "PNG")
    return stream.getvalue()


@pytest.fixture
def multimodal():
    """How to open a task: multimodal("scenes_captions", "attention=sa", ...)."""

    def open_(experiment, *overrides):
        small = SMALL[experiment] + (SHARDS if experiment in {"openmoji", "img2dataset"} else ())
        config = load_config(f"multimodal/{experiment}", (*small, *overrides))
        return load_task(config.task).open(config, Silent())

    return open_


@pytest.fixture(scope="session")
def few_spoken(tmp_path_factory):
    """Spoken digits of a few utterances, in a folder of their own; kernels stay where they are built."""
    patch, folder = pytest.MonkeyPatch(), tmp_path_factory.mktemp("spoken")
    patch.setattr(synthetic, "cache_root", lambda: folder)
    patch.setitem(synthetic.RECIPES, "digits", synthetic.Recipe("digits", 40, 20))
    yield
    patch.undo()


@pytest.fixture
def shards(tmp_path):
    """img2dataset's layout: two shards of 20 pictures of 10 subjects; the second one has other captions."""
    root = tmp_path / "pairs"
    root.mkdir()
    for shard in range(2):
        with webdataset.TarWriter(str(root / f"{shard:05d}.tar")) as writer:
            for row in range(20):
                key = f"{shard:05d}{row:04d}"
                text = f"{'ab'[shard]} picture of thing {row % 10}"
                facts = {"key": key, "caption": text, "group": f"kind {row % 2}", "status": "success"}
                files = {"__key__": key, "png": picture(100 * shard + row), "txt": text}
                writer.write(files | {"json": json.dumps(facts).encode()})
    return root


@pytest.fixture
def emoji(tmp_path):
    """OpenMoji's layout: 30 emoji, every third one in two skin tones besides; transparent pictures."""
    root = tmp_path / "emoji"
    root.mkdir()
    names = []
    for number in range(30):
        base = f"1F9{number:02X}"
        names.append((f"{base}-FE0F", f"thing {number}"))
        if number % 3 == 0:
            names += [(f"{base}-{tone}", f"thing {number}: {tone}") for tone in ("1F3FB", "1F3FF")]
    with webdataset.TarWriter(str(root / "00000.tar")) as writer:
        for row, (hexcode, text) in enumerate(names):
            facts = {"caption": text, "hexcode": hexcode, "group": "ab"[row % 2]}
            files = {"__key__": f"{row:09d}", "png": picture(row, "RGBA"), "txt": text}
            writer.write(files | {"json": json.dumps(facts).encode()})
    return root
