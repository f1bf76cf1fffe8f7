"""Sets of samples that can be fetched by number, and the samples that cannot be read.

A source is opened once per process; a worker process gets a copy by pickling, so a source keeps paths and
offsets rather than open files.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from tasks.errors import UserError
from tasks.samples.order import seeded_words

NAMED = 3  # damaged samples that a message names
Sample = tuple[Any, ...]


class DamagedSampleError(ValueError):
    """A sample that cannot be used: `name` says which, `reason` why. Two arguments, so that it pickles."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


class Source(Protocol):
    """Samples 0 .. len-1."""

    fingerprint: str

    def __len__(self) -> int: ...

    def fetch(self, index: int, rng: np.random.Generator | None) -> Sample:
        """Return sample `index`, augmented by `rng`; with None as it is.

        Raises DamagedSampleError for one that cannot be read.
        """


def sample_rng(seed: int, epoch: int, index: int) -> np.random.Generator:
    """Return the generator that augments a sample in an epoch: the same whoever fetches it, and when."""
    return np.random.Generator(np.random.PCG64(seeded_words(2, "augmentation", seed, epoch, index)))


@dataclass
class Damaged:
    """Damaged samples met so far, each counted once, up to a limit.

    `limit` is the number of different samples that may be skipped.
    """

    limit: int
    found: dict[str, str] = field(default_factory=dict)

    def add(self, error: DamagedSampleError) -> None:
        """Count a damaged sample. Raises UserError when there are more than `limit`."""
        self.found[error.name] = error.reason
        if len(self.found) > self.limit:
            raise UserError(
                f"{len(self.found)} damaged samples, {self.limit} may be skipped ({self.names()}); "
                "repair the data or raise data.max_damaged"
            )

    def names(self) -> str:
        """Return the first few with their reasons."""
        shown = [f"{name}: {reason}" for name, reason in list(self.found.items())[:NAMED]]
        more = len(self.found) - len(shown)
        return "; ".join(shown) + (f"; and {more} more" if more else "")

    def note(self) -> str | None:
        """Return what a record says of them, None when there are none."""
        if not self.found:
            return None
        return f"{len(self.found)} damaged samples skipped ({self.names()})"
