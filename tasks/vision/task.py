"""Image classification.

Axis legend: B images, C colour channels, S pixels of a side, K classes.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tasks.base import Batch, Display
from tasks.samples.seeded import seeded
from tasks.samples.source import Source
from tasks.samples.task import SampledTask
from tasks.vision.model import build_classifier, create_vit
from tasks.vision.sources import open_sources

TOP = 5


class VisionTask(SampledTask):
    """Images with a Vision Transformer over them."""

    equal_lengths = True

    def __init__(self, config: Any, train: Source, validation: Source, classes: int, channels: int) -> None:
        super().__init__(config, train, validation)
        self.classes, self.channels = classes, channels
        self.data_name = f"{config.data.source}, {len(train)} training and {len(validation)} test images"
        both = f"{train.fingerprint} {validation.fingerprint} {config.data.image_size}"
        self.fingerprint = hashlib.sha256(both.encode()).hexdigest()
        self.tokens_per_sample = self._tokens()
        self._mix = self._build_mix()

    @classmethod
    def open(cls, config: Any, display: Display) -> "VisionTask":
        """Open the data of a run.

        Raises:
            ValueError: images that are not there or not as expected.
        """
        with display.work("images") as report:
            report("reading", 0.0)
            return cls(config, *open_sources(config.data))

    def build_model(self) -> nn.Module:
        """Return the classifier, initialised from the run's seed."""
        return build_classifier(
            self.config.model,
            self.config.attention,
            image_size=self.config.data.image_size,
            channels=self.channels,
            classes=self.classes,
            seed=self.config.seed,
        )

    def collate(self, samples: Sequence[tuple[Tensor, int, int]]) -> Batch:
        """Return images (B, C, S, S) and labels (B,)."""
        images, labels, _ = zip(*samples, strict=True)
        return torch.stack(images), torch.tensor(labels)

    def collate_training(self, samples: Sequence[tuple[Tensor, int, int]]) -> Batch:
        """Return images (B, C, S, S) and labels (B,), or, where images are mixed, label weights (B, K)."""
        images, labels = self.collate(samples)
        if self._mix is None or len(samples) % 2:  # timm mixes pairs
            return images, labels
        with seeded(samples[0][2]):
            return self._mix(images, labels)

    def inputs(self, batch: Batch) -> Batch:
        """Return what the model takes of a batch."""
        return batch[:1]

    def weight(self, batch: Batch) -> float:
        """Every image is a target."""
        return float(len(batch[0]))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross entropy in nats per image, with label smoothing."""
        images, labels = batch
        # Mixed labels are smoothed already; a loss that is measured is that of the true labels.
        smooth = model.training and not labels.is_floating_point()
        smoothing = self.config.model.label_smoothing if smooth else 0.0
        return F.cross_entropy(model(images).float(), labels, label_smoothing=smoothing)

    def evaluate(self, model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        """Return the loss in nats per image and how often the class is the first, or among the first five."""
        nats, first, five, count = 0.0, 0, 0, 0
        for images, labels in batches:
            logits = model(images).float()  # B K
            nats += float(F.cross_entropy(logits, labels, reduction="sum"))
            ranked = logits.topk(min(TOP, logits.shape[1]), dim=1).indices == labels[:, None]
            first += int(ranked[:, 0].sum())
            five += int(ranked.any(1).sum())
            count += len(labels)
        return {"loss": nats / count, "accuracy": first / count, "top5": five / count}

    def sample(self, model: nn.Module, size: int) -> str | None:
        """A classifier makes nothing to show."""
        return None

    def _tokens(self) -> int:
        """Return how many tokens an image is to the model, special ones included."""
        shape = self.config.model.model_copy(update={"weights": None})
        with torch.device("meta"):
            vit = create_vit(shape, self.config.data.image_size, self.channels, self.classes)
        return vit.patch_embed.num_patches + vit.num_prefix_tokens

    def _build_mix(self) -> Any:
        data = self.config.data
        if not (data.mixup or data.cutmix):
            return None
        from timm.data import Mixup

        return Mixup(
            mixup_alpha=data.mixup,
            cutmix_alpha=data.cutmix,
            label_smoothing=self.config.model.label_smoothing,
            num_classes=self.classes,
        )
