"""Which of a list of words was said.

Axis legend: B recordings, K words.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tasks.base import Batch
from tasks.errors import UserError
from tasks.speech.config import NAMED
from tasks.speech.model import build_model
from tasks.speech.recordings import Recordings
from tasks.speech.source import Target
from tasks.speech.task import SpeechTask


class KeywordTask(SpeechTask):
    """Classification of words."""

    kind = "words"

    def targets(self, sides: Sequence[Recordings]) -> Target:
        """Number the words by their order in the training recordings' sorted set."""
        source = self.config.data.source
        if source not in NAMED:
            raise UserError(
                f"data.source: {source} has sentences; task keywords takes {', '.join(sorted(NAMED))}"
            )
        self.words = sorted({sides[0].said(index) for index in range(len(sides[0]))})
        if len(self.words) < 2:
            raise UserError(f"data: only the word '{self.words[0]}' is there; expected two or more")
        numbers = {word: number for number, word in enumerate(self.words)}

        def target(said: str) -> int:
            if said not in numbers:
                raise ValueError(f"'{said}' is none of the {len(numbers)} words of the training recordings")
            return numbers[said]

        return target

    def build_model(self) -> nn.Module:
        """Return the classifier, initialised from the run's seed."""
        return build_model(self.config, classes=len(self.words), pooled=True)

    def collate_targets(self, targets: list[Any]) -> tuple[Tensor, ...]:
        """Return labels (B,)."""
        return (torch.tensor(targets),)

    def weight(self, batch: Batch) -> float:
        """Every recording is a target."""
        return float(len(batch[2]))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross entropy in nats per recording, with label smoothing in training."""
        features, lengths, labels = batch
        smoothing = self.config.model.label_smoothing if model.training else 0.0
        logits, _ = model(features, lengths)
        return F.cross_entropy(logits.float(), labels, label_smoothing=smoothing)

    def evaluate(self, model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        """Return the loss in nats per recording and the share of words that are recognised."""
        nats, hits, count = 0.0, 0, 0
        for features, lengths, labels in batches:
            logits = model(features, lengths)[0].float()
            nats += float(F.cross_entropy(logits, labels, reduction="sum"))
            hits += int((logits.argmax(1) == labels).sum())
            count += len(labels)
        return {"loss": nats / count, "accuracy": hits / count}

    def sample(self, model: nn.Module, size: int) -> str | None:
        """A classifier makes nothing to show."""
        return None
