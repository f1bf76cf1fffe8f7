"""Config sections of the speech tasks."""

from typing import Literal

from pydantic import Field, model_validator

from tasks.config import Fraction, NonNegativeInt, PositiveFloat, PositiveInt, Section

Source = Literal["synthetic", "digits", "speech_commands", "ljspeech", "librispeech"]
TRANSCRIBED = {"synthetic", "ljspeech", "librispeech"}
NAMED = {"synthetic", "digits", "speech_commands"}


class SpeechModelConfig(Section):
    """The encoder and how it is read out."""

    architecture: Literal["transformer", "conformer"] = Field(
        "transformer", description="xsa_core's encoder, or torchaudio's Conformer"
    )
    n_layers: PositiveInt
    d_model: PositiveInt
    n_heads: PositiveInt
    mlp_ratio: PositiveFloat = 4.0
    subsample: Literal[1, 2, 4] = Field(4, description="feature frames of one position of the encoder")
    kernel_size: PositiveInt = Field(31, description="of the Conformer's convolutions, odd")
    dropout: Fraction = 0.0
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="of words")
    beam: PositiveInt = Field(1, description="hypotheses of the search in transcription; 1: greedy")

    @model_validator(mode="after")
    def _kernel_is_odd(self) -> "SpeechModelConfig":
        if self.kernel_size % 2 == 0:
            raise ValueError(f"model.kernel_size: expected an odd number, got {self.kernel_size}")
        return self


class SpeechDataConfig(Section):
    """Where the speech comes from and what the encoder sees of it."""

    source: Source = Field("synthetic", description="digits: Free Spoken Digits in webdataset shards")
    path: str | None = Field(None, description="directory of the recordings; synthetic speech needs none")
    train: str | None = Field(None, description="librispeech: train-clean-100; digits: train-*.tar")
    validation: str | None = Field(None, description="librispeech: dev-clean; digits: test-*.tar")
    split: Literal["official", "speaker"] = Field(
        "official", description="speaker: nobody is heard in both training and test"
    )
    test_speakers: list[str] = Field(["theo", "yweweler"], description="of split=speaker")
    validation_fraction: float = Field(0.05, gt=0, lt=1, description="of ljspeech")
    sample_rate: PositiveInt = Field(8000, description="of the recordings, in Hz")
    resample: bool = Field(False, description="convert recordings of another rate instead of refusing them")
    n_mels: PositiveInt = 40
    window: PositiveFloat = Field(0.025, description="of a spectrum, in seconds")
    hop: PositiveFloat = Field(0.01, description="between spectra, in seconds")
    max_seconds: PositiveFloat = Field(20.0, description="longer recordings count as damaged")
    noise_db: float | None = Field(
        None, description="white noise in training and test, as speech over noise in dB; null: none"
    )
    time_masks: NonNegativeInt = Field(0, description="SpecAugment: masked stretches of time")
    time_width: PositiveInt = Field(20, description="their largest width, in frames")
    mel_masks: NonNegativeInt = Field(0, description="SpecAugment: masked bands")
    mel_width: PositiveInt = Field(8, description="their largest width, in mel bands")
    workers: NonNegativeInt = Field(0, le=256, description="processes that read ahead")
    max_damaged: NonNegativeInt = Field(10, description="recordings that cannot be read and are skipped")

    @model_validator(mode="after")
    def _fits(self) -> "SpeechDataConfig":
        synthetic = self.source == "synthetic"
        if synthetic and self.path:
            raise ValueError("data.path: given, but data.source is synthetic; set data.source too")
        if not synthetic and not self.path:
            raise ValueError(f"data.path: no value; source {self.source} needs a directory, data.path=DIR")
        if self.split == "speaker" and self.source != "digits":
            raise ValueError("data.split: speaker is for source digits; leave it out")
        if self.hop > self.window:
            raise ValueError(f"data.hop: {self.hop} s is longer than data.window, {self.window} s")
        return self
