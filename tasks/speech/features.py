"""From samples to what the encoder sees: noise, log-mel spectra, SpecAugment.

Axis legend: N samples of a recording, T frames, M mel bands.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tasks.samples.seeded import seeded
from tasks.speech.config import SpeechDataConfig

FLOOR = 1e-6  # power below which a band is silent


class Frontend:
    """Samples (N,) at the config's rate -> features (T, M) float32, mean 0 and deviation 1 per recording."""

    def __init__(self, data: SpeechDataConfig) -> None:
        from torchaudio.transforms import FrequencyMasking, MelSpectrogram, TimeMasking

        window = round(data.window * data.sample_rate)
        n_fft = 2 ** max(8, (window - 1).bit_length())  # fewer bins leave the lowest bands empty
        self.data = data
        self.spectrogram = MelSpectrogram(
            data.sample_rate,
            n_fft=n_fft,
            win_length=window,
            hop_length=round(data.hop * data.sample_rate),
            n_mels=data.n_mels,
        )
        self.masks = [TimeMasking(data.time_width)] * data.time_masks
        self.masks += [FrequencyMasking(min(data.mel_width, data.n_mels))] * data.mel_masks

    def __call__(self, samples: NDArray[np.float32], rng: np.random.Generator, *, augment: bool) -> Tensor:
        """Return features; noise is drawn from `rng`, and SpecAugment's masks if `augment`."""
        if self.data.noise_db is not None:
            samples = noisy(samples, self.data.noise_db, rng)
        power = self.spectrogram(torch.from_numpy(samples))  # M T
        features = power.clamp_min(FLOOR).log()
        features = (features - features.mean()) / features.std().clamp_min(1e-3)
        if augment and self.masks:
            with seeded(int(rng.integers(2**31))):
                for mask in self.masks:
                    features = mask(features[None])[0]  # masked with 0, the mean
        return features.T.contiguous()


def noisy(samples: NDArray[np.float32], decibels: float, rng: np.random.Generator) -> NDArray[np.float32]:
    """Return samples (N,) with white noise, so that speech is `decibels` above it in power."""
    power = float(np.mean(np.square(samples, dtype=np.float64)))
    scale = np.sqrt(power / 10 ** (decibels / 10))
    return (samples + scale * rng.standard_normal(len(samples))).astype(np.float32)


def frames(seconds: float, data: SpeechDataConfig) -> int:
    """Return how many frames a recording of this length has."""
    return 1 + round(seconds * data.sample_rate) // round(data.hop * data.sample_rate)
