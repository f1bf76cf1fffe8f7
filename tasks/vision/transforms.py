"""timm's image transforms, made a pure function of the image and a generator.

timm draws from the global generators of Python, NumPy and torch. They are set from the sample's own
generator for the call and put back, so a sample looks the same in whichever process it is read.
"""

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tasks.vision.config import VisionDataConfig

Transform = Callable[[Any], Tensor]
SMALL = 64  # pixels: smaller images are neither cropped nor scaled for evaluation


def build_transforms(data: VisionDataConfig) -> tuple[Transform, Transform]:
    """Return the transforms of training and evaluation: PIL image -> (3, S, S) float32.

    Raises:
        ValueError: a RandAugment policy that timm does not know.
    """
    from timm.data import create_transform

    size = data.image_size
    plain = create_transform(size, is_training=False, crop_pct=1.0 if size <= SMALL else 0.875)
    if data.augment == "none":
        return plain, plain
    try:
        training = create_transform(
            size,
            is_training=True,
            scale=(data.crop_scale, 1.0),
            color_jitter=None,
            auto_augment=data.rand_augment if data.augment == "rand" else None,
            re_prob=data.erase,
        )
    except (AssertionError, ValueError, KeyError) as error:
        raise ValueError(
            f"data.rand_augment: timm does not know '{data.rand_augment}' ({error}); e.g. rand-m9-mstd0.5"
        ) from error
    return training, plain


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Set Python's, NumPy's and torch's generators for a block, then put them back as they were."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
