"""Recordings as samples: decoded, checked, turned into features, with a target."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tasks.base import Display
from tasks.errors import UserError
from tasks.samples.order import seeded_words
from tasks.samples.source import DamagedSampleError
from tasks.speech.config import SpeechDataConfig
from tasks.speech.features import Frontend, frames
from tasks.speech.recordings import OPENERS, Recordings, SpokenRecordings

Target = Callable[[str], Any]  # raises ValueError for what cannot be one
Check = Callable[[int, Any], None]  # of frames and target; raises ValueError where they do not fit


class SpeechSource:
    """Samples (features (T, M), target) of some recordings."""

    def __init__(self, recordings: Recordings, frontend: Frontend, target: Target, check: Check) -> None:
        self.recordings, self.frontend, self.target, self.check = recordings, frontend, target, check
        self.fingerprint = recordings.fingerprint

    def __len__(self) -> int:
        return len(self.recordings)

    def fetch(self, index: int, rng: np.random.Generator | None) -> tuple[Tensor, Any]:
        """Return features and target; noise of an evaluation is the same at every call."""
        data = self.frontend.data
        try:
            samples, rate = self.recordings.audio(index)
            samples = at_rate(samples, rate, data)
            if not len(samples) or not np.isfinite(samples).all():
                raise ValueError("has no samples, or some that are no numbers")
            if len(samples) > data.max_seconds * data.sample_rate:
                seconds = len(samples) / data.sample_rate
                raise ValueError(f"{seconds:.1f} s long, more than data.max_seconds {data.max_seconds:g}")
            target = self.target(self.recordings.said(index))
            self.check(frames(len(samples) / data.sample_rate, data), target)
        except (OSError, ValueError, RuntimeError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise DamagedSampleError(self.recordings.name(index), reason) from error
        fixed = np.random.Generator(np.random.PCG64(seeded_words(2, "noise", index)))
        return self.frontend(samples, rng or fixed, augment=rng is not None), target

    def lengths(self) -> NDArray[np.int64]:
        """Return frames of every sample (N,), by the headers of the recordings."""
        seconds = (self.recordings.seconds(index) for index in range(len(self)))
        return np.array([frames(length, self.frontend.data) for length in seconds], dtype=np.int64)


def at_rate(samples: NDArray[np.float32], rate: int, data: SpeechDataConfig) -> NDArray[np.float32]:
    """Return the samples at the config's rate. Raises ValueError where it would have to convert unasked."""
    if rate == data.sample_rate:
        return samples
    if not data.resample:
        raise ValueError(
            f"recorded at {rate} Hz, expected {data.sample_rate}; set data.sample_rate={rate}, or "
            "data.resample=true to convert"
        )
    import torch
    from torchaudio.functional import resample

    return resample(torch.from_numpy(samples), rate, data.sample_rate).numpy()


def open_recordings(data: SpeechDataConfig, kind: str, display: Display) -> list[Recordings]:
    """Return the recordings of training and validation; `kind` of synthetic speech: words or sentences.

    Raises:
        UserError: recordings that are not there, not as expected, or at another rate.
    """
    if data.source == "synthetic":
        from tasks.speech.synthetic import synthetic

        with display.work("synthetic speech") as report:
            return [SpokenRecordings(side) for side in synthetic(kind, report)]
    root = Path(data.path or "").expanduser()
    if not root.is_dir():
        raise UserError(f"data.path: {root} is no directory; give the one that holds the recordings")
    sides = list(OPENERS[data.source](data, root))
    for side in sides:  # a wrong rate is wrong for all: said once, not counted as damage
        try:
            at_rate(*side.audio(0), data)
        except ValueError as error:
            raise UserError(f"{side.name(0)}: {error}") from error
        except (OSError, RuntimeError):
            continue
    return sides
