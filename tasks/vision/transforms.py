"""timm's image transforms. They draw from global generators: call them within `tasks.samples.seeded`."""

from collections.abc import Callable
from typing import Any

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
