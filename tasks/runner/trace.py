"""What a run remembers about itself for its record; part of every checkpoint."""

import hashlib
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from tasks.base import Batch

MAX_RATES = 4096  # of the last steps; enough for a median, small enough for a checkpoint


@dataclass
class Trace:
    """Curves, counts, and the running hash of every training batch in order."""

    curves: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    batches_sha256: str = ""
    samples: int = 0
    tokens: int = 0
    training_seconds: float = 0.0
    evaluation_seconds: float = 0.0
    rates: list[float] = field(default_factory=list)  # units per second, a value per settled step
    peak_memory: int = 0  # bytes, over all processes that worked on the run

    def hash_batch(self, batch: Batch) -> None:
        """Extend the hash: sha256 over the hash so far and the batch's bytes."""
        digest = hashlib.sha256(self.batches_sha256.encode())
        for part in batch:
            digest.update(f"{part.dtype}{tuple(part.shape)}".encode())
            digest.update(memoryview(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))
        self.batches_sha256 = digest.hexdigest()

    def count(self, samples: int, tokens: int, seconds: float) -> None:
        """Count one update."""
        self.samples += samples
        self.tokens += tokens
        self.training_seconds += seconds
        del self.rates[:-MAX_RATES]

    def add(self, kind: str, step: int, values: dict[str, float]) -> bool:
        """Add a point to the curves of a kind (train, validation); tell whether it is new."""
        curve = self.curves.setdefault(kind, {"step": []})
        if curve["step"] and curve["step"][-1] == step:
            return False  # a resumed run evaluates its last step once more, with the same result
        curve["step"].append(step)
        for name, value in values.items():
            curve.setdefault(name, []).append(float(value))
        return True

    def rate(self) -> float | None:
        """Return the median speed in units per second."""
        return median(self.rates) if self.rates else None

    def state_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the values of a checkpoint."""
        for name, value in state.items():
            setattr(self, name, value)
