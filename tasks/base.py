"""What a task is to the runner: config sections, data, a model and how both meet.

Axis legend: B samples of a micro-batch. A batch is whatever the task's stream yields; the runner only
moves it to the device, hashes it and hands it back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # the command line reads specs and configs without torch
    import torch
    from torch import nn

    Batch = tuple[torch.Tensor, ...]
else:
    Batch = tuple


class Display(Protocol):
    """Where a task tells what it does while its data is being prepared."""

    def work(self, name: str) -> AbstractContextManager[Callable[[str, float], None]]:
        """Show a piece of work; the function it yields takes what is being done and the fraction done."""


class Stream(Protocol):
    """Training batches in a seeded order, restartable at any position."""

    def next_batch(self, size: int) -> Batch:
        """Return the next `size` samples of this rank."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position, as plain values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position. Raises ValueError for one of other data."""


class Task(Protocol):
    """One task with its data open: built once per run from the resolved config."""

    data_name: str
    fingerprint: str
    tokens_per_sample: int
    data_note: str | None
    equal_lengths: bool  # whether no sample of a batch is padded

    def build_model(self) -> nn.Module:
        """Return the model with its weights initialised from the run's seed."""

    def stream(self, rank: int, world_size: int) -> Stream:
        """Return the training stream of one rank."""

    def validation(self, samples: int, batch: int) -> Iterable[Batch]:
        """Return fixed validation batches, the same at every call and for every variant."""

    def inputs(self, batch: Batch) -> Batch:
        """Return what the model takes of a batch to compute its output, without targets."""

    def weight(self, batch: Batch) -> float:
        """Return what a batch's mean loss counts in the mean of several: its number of targets."""

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the mean training loss of a micro-batch (fp32 scalar)."""

    def evaluate(self, model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        """Return validation metrics by name; `loss` is among them."""

    def sample(self, model: nn.Module, size: int) -> str | None:
        """Return something the model made, of about `size` bytes, or None where nothing can be shown."""


@dataclass(frozen=True)
class TaskSpec:
    """A task's config sections and its builder."""

    model_config: type
    data_config: type
    open: Callable[[Any, Display], Task]  # open(config, display)
    metric: str  # the validation metric that is compared, e.g. "bits_per_byte"
