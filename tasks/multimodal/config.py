"""Config sections of the multimodal tasks."""

from typing import Literal

from pydantic import Field, model_validator

from tasks.config import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section
from tasks.speech.config import SpeechDataConfig
from tasks.vision.config import VisionModelConfig

SCENE = 20  # pixels of a side of an embedded scene; a test holds it equal to the drawing's
LONGEST_CAPTION = 18  # words of a scene's caption with begin and end, likewise


class StackSection(Section):
    """Sizes of one of xsa_core's stacks."""

    n_layers: PositiveInt
    d_model: PositiveInt
    n_heads: PositiveInt
    mlp_ratio: PositiveFloat = 4.0
    dropout: float = Field(0.0, ge=0, lt=1)


class ContrastiveModelConfig(Section):
    """Two towers and the space in which they meet."""

    image: VisionModelConfig = Field(description="timm's Vision Transformer")
    text: StackSection = Field(description="a causal stack, read at the end of the text")
    width: PositiveInt = Field(128, description="of the space both towers project to")
    exclusive: Literal["both", "image", "text"] = Field(
        "both", description="towers that have the run's attention; the other one is plain"
    )

    @model_validator(mode="after")
    def _no_classifier(self) -> "ContrastiveModelConfig":
        if self.image.label_smoothing:
            raise ValueError(
                "model.image.label_smoothing: is of classifiers; leave it out of a contrastive model"
            )
        return self


class CaptioningModelConfig(StackSection):
    """One decoder for patches and words."""

    patch_size: PositiveInt = Field(4, description="pixels of a side of a patch")


class FusionModelConfig(StackSection):
    """One encoder for patches and spectra."""

    patch_size: PositiveInt = Field(2, description="pixels of a side of a patch")
    subsample: Literal[1, 2, 4] = Field(4, description="spectra of one position of the encoder")
    label_smoothing: float = Field(0.0, ge=0, lt=1)


class PairDataConfig(Section):
    """Images with captions."""

    source: Literal["scenes", "openmoji", "img2dataset"] = Field(
        "scenes", description="scenes: drawn from digits; the others: shards with an image, txt and json"
    )
    path: str | None = Field(None, description="directory of the shards; scenes need none")
    train: str | None = Field(None, description="img2dataset: shards of training; *.tar")
    validation: str | None = Field(None, description="img2dataset: shards of test; null: split by caption")
    validation_fraction: float = Field(0.1, gt=0, lt=1, description="of what is split by caption or emoji")
    image_size: PositiveInt = Field(SCENE, description="pixels of a side the model sees")
    context: PositiveInt = Field(
        LONGEST_CAPTION, ge=3, description="tokens of a text, begin and end included; longer ones are cut"
    )
    noise: NonNegativeFloat = Field(0.0, description="of scenes: deviation of noise on pixels of 0 to 1")
    questions: Fraction = Field(0.5, description="of scenes in captioning: share of questions in training")
    augment: Literal["none", "crop"] = Field("none", description="of shards: random crops, never mirrored")
    crop_scale: float = Field(0.5, gt=0, le=1, description="smallest area of a crop, of the image's")
    class_key: str | None = Field(None, description="field of the json that has a class: zero-shot accuracy")
    prompts: list[str] = Field(["{}"], min_length=1, description="texts for a class, {} being its name")
    workers: NonNegativeInt = Field(0, le=256, description="processes that read ahead")
    max_damaged: NonNegativeInt = Field(10, description="samples that cannot be read and are skipped")

    @model_validator(mode="after")
    def _fits(self) -> "PairDataConfig":
        if self.source == "scenes":
            _check_scenes(self)
            return self
        if not self.path:
            raise ValueError(f"data.path: no value; source {self.source} needs a directory, data.path=DIR")
        if self.noise:
            raise ValueError("data.noise: is of source scenes; leave it out")
        if self.source == "openmoji" and (self.train or self.validation):
            raise ValueError("data.train, data.validation: openmoji is split by emoji; leave them out")
        if any(prompt.count("{}") != 1 for prompt in self.prompts):
            raise ValueError("data.prompts: expected texts with one {} each, such as 'a picture of {}'")
        return self


def _check_scenes(data: PairDataConfig) -> None:
    if data.path or data.train or data.validation or data.class_key:
        raise ValueError(
            "data.path, train, validation, class_key: given, but data.source is scenes; set data.source too"
        )
    if data.image_size != SCENE:
        raise ValueError(f"data.image_size: scenes have {SCENE} pixels a side, got {data.image_size}")
    if data.context < LONGEST_CAPTION:
        raise ValueError(f"data.context: captions of scenes need {LONGEST_CAPTION}, got {data.context}")
    if data.augment != "none":
        raise ValueError("data.augment: scenes are not cropped, a digit could be lost; leave it out")


class FusionDataConfig(Section):
    """A handwritten digit and a spoken one."""

    source: Literal["synthetic", "digits"] = Field(
        "synthetic", description="of the speech; digits: Free Spoken Digits in webdataset shards"
    )
    path: str | None = Field(None, description="directory of the recordings; synthetic speech needs none")
    split: Literal["official", "speaker"] = Field("official", description="see the speech tasks")
    test_speakers: list[str] = Field(["theo", "yweweler"], description="of split=speaker")
    n_mels: PositiveInt = 40
    sample_rate: PositiveInt = Field(8000, description="of the recordings, in Hz")
    noise_db: float | None = Field(
        None, description="white noise on the sound, as speech over noise in dB; null: none"
    )
    noise: NonNegativeFloat = Field(0.0, description="deviation of noise on pixels of 0 to 1")
    train_pairs: PositiveInt = Field(12_000, description="pairs of one epoch")
    test_pairs: PositiveInt = 2_000
    workers: NonNegativeInt = Field(0, le=256, description="processes that read ahead")
    max_damaged: NonNegativeInt = Field(10, description="recordings that cannot be read and are skipped")

    @model_validator(mode="after")
    def _fits(self) -> "FusionDataConfig":
        self.speech()
        return self

    def speech(self) -> SpeechDataConfig:
        """Return the section of the speech tasks that says the same of the sound."""
        return SpeechDataConfig(**self.model_dump(include=set(SpeechDataConfig.model_fields)))
