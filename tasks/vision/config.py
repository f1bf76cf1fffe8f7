"""Config sections of the vision task."""

from typing import Literal

from pydantic import Field, model_validator

from tasks.config import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section

BelowOne = Field(0.0, ge=0, lt=1)


class VisionModelConfig(Section):
    """A Vision Transformer of timm's registry; null keeps what the architecture has."""

    architecture: str = Field("vit_tiny_patch16_224", description="a plain Vision Transformer of timm")
    weights: str | None = Field(None, description="a checkpoint file of timm's, loaded before training")
    patch_size: PositiveInt | None = None
    width: PositiveInt | None = Field(None, description="embed_dim")
    depth: PositiveInt | None = Field(None, description="number of blocks")
    n_heads: PositiveInt | None = None
    mlp_ratio: PositiveFloat | None = None
    pooling: Literal["token", "avg", "map"] | None = Field(
        None, description="what the head reads: class token, mean of the patches, attention pooling"
    )
    class_token: bool | None = None
    registers: NonNegativeInt | None = Field(None, description="extra learned tokens")
    qk_norm: bool | None = None
    drop_path: float = BelowOne
    dropout: float = BelowOne
    label_smoothing: float = BelowOne


class VisionDataConfig(Section):
    """Where the images come from and what is done to them."""

    source: Literal["digits", "cifar10", "folder", "shards"] = Field(
        "digits",
        description="digits: scikit-learn's; cifar10: torchvision's; folder: one per class",
    )
    path: str | None = Field(None, description="directory of the images; digits need none")
    train: str | None = Field(None, description="folder: train; shards: train-*.tar")
    validation: str | None = Field(None, description="folder: val; shards: test-*.tar")
    image_size: PositiveInt = Field(description="pixels of a side the model sees")
    classes: PositiveInt | None = Field(None, description="of shards without a classes.txt")
    augment: Literal["none", "shift", "flip_crop", "rand"] = Field(
        "none", description="shift: for digits; flip_crop: random crop and mirror; rand: RandAugment too"
    )
    noise: NonNegativeFloat = Field(0.0, description="of digits, training and test, in pixels of 0 to 1")
    test_copies: PositiveInt = Field(1, description="of digits: test images, each under noise of its own")
    rand_augment: str = Field("rand-m9-mstd0.5-inc1", description="timm's policy of augment=rand")
    crop_scale: Fraction = Field(0.35, description="smallest area of a random crop, of the image's")
    erase: Fraction = Field(0.0, description="probability of a random erased rectangle")
    mixup: NonNegativeFloat = Field(0.0, description="alpha of mixup; 0: off")
    cutmix: NonNegativeFloat = Field(0.0, description="alpha of CutMix; 0: off")
    workers: NonNegativeInt = Field(0, le=256, description="processes that read ahead")
    max_damaged: NonNegativeInt = Field(10, description="images that cannot be read and are skipped")

    @model_validator(mode="after")
    def _fits(self) -> "VisionDataConfig":
        digits = self.source == "digits"
        if digits and self.path:
            raise ValueError(
                "data.path: given, but data.source is digits; add data.source=folder, shards or cifar10"
            )
        if not digits and not self.path:
            raise ValueError(f"data.path: no value; source {self.source} needs a directory, data.path=DIR")
        if digits != (self.augment == "shift") and self.augment != "none":
            able = "none or shift" if digits else "none, flip_crop or rand"
            raise ValueError(f"data.augment: source {self.source} takes {able}, got '{self.augment}'")
        if self.source in {"digits", "cifar10"} and (self.train or self.validation):
            raise ValueError(
                f"data.train, data.validation: source {self.source} has its own split; leave them out"
            )
        if not digits and (self.noise or self.test_copies > 1):
            raise ValueError(f"data.noise, data.test_copies: of digits, data.source is {self.source}")
        if self.test_copies > 1 and not self.noise:
            raise ValueError("data.test_copies: without data.noise all copies are the same; set both")
        if self.crop_scale == 0:
            raise ValueError("data.crop_scale: expected more than 0 and at most 1, got 0")
        return self
