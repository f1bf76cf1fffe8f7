"""The sum of a handwritten and a spoken digit, by one encoder over patches and spectra.

Axis legend: B pairs, S pixels of a side, P patches, T spectra, M mel bands, C width, K classes.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from tasks.base import Batch, Display
from tasks.multimodal.config import FusionModelConfig
from tasks.multimodal.decoder import Patches
from tasks.multimodal.spoken import CLASSES, DigitPairs, open_digit_pairs
from tasks.samples.buckets import Bucketed
from tasks.samples.source import Sample
from tasks.samples.task import SampledTask
from tasks.speech.model import LONGEST, Subsample, real
from tasks.vision.digits import SIZE
from xsa_core import Encoder, EncoderConfig, Mask, initialize
from xsa_core.roles import ParameterRole, Role


class FusionModel(nn.Module):
    """Patches, then spectra, in one sequence from the first layer on.

    Args:
        model, attention: config sections. n_mels: M.
    """

    def __init__(self, model: FusionModelConfig, attention, *, n_mels: int) -> None:
        super().__init__()
        self.patches = Patches(SIZE, 1, model.patch_size, model.d_model)
        self.subsample = Subsample(n_mels, model.d_model, model.subsample)
        self.modality = nn.Parameter(torch.zeros(2, model.d_model))
        config = EncoderConfig(
            n_layers=model.n_layers,
            n_heads=model.n_heads,
            d_model=model.d_model,
            max_seq_len=self.patches.count + LONGEST,
            mlp_ratio=model.mlp_ratio,
            dropout=model.dropout,
            **attention.model_dump(),
        )
        self.encoder = Encoder(config)
        self.head = nn.Linear(model.d_model, CLASSES)

    def forward(self, images: Tensor, features: Tensor, lengths: Tensor) -> Tensor:
        """Return logits `B K`.

        Args:
            images: `B 1 S S`. features: `B T M`. lengths: `B` int64, spectra that are not padding.
        """
        seen = self.patches(images)  # B P C
        heard, lengths = self.subsample(features, lengths)  # B T' C
        x = torch.cat([seen + self.modality[0], heard + self.modality[1]], dim=1)
        valid = real(lengths + seen.shape[1], x.shape[1])  # B P+T'
        x = self.encoder(x, mask=None if bool(valid.all()) else Mask.padding(valid))
        weight = valid[:, :, None].to(x.dtype)
        return self.head((x * weight).sum(1) / weight.sum(1))

    def declared_roles(self) -> dict[str, ParameterRole]:
        """The modality is looked up; the head is a linear layer, and yet no hidden matrix."""
        return {"modality": ParameterRole(Role.EMBEDDING), "head.weight": ParameterRole(Role.HEAD)}


class FusionTask(SampledTask):
    """Classification of pairs."""

    equal_lengths = False

    def __init__(self, config: Any, train: DigitPairs, test: DigitPairs) -> None:
        lengths = train.lengths()
        super().__init__(config, train, test, Bucketed(lengths, config.seed))
        self.data_name = f"{config.data.source}, {len(train)} training and {len(test)} test pairs of digits"
        settings = config.data.model_dump(include={"n_mels", "noise_db", "sample_rate"})
        both = train.fingerprint, test.fingerprint, settings
        self.fingerprint = hashlib.sha256(repr(both).encode()).hexdigest()
        patches = (SIZE // config.model.patch_size) ** 2
        self.tokens_per_sample = patches + max(1, round(float(lengths.mean()) / config.model.subsample))

    @classmethod
    def open(cls, config: Any, display: Display) -> "FusionTask":
        """Open the data of a run.

        Raises:
            ValueError: recordings that are not there or not as expected.
        """
        return cls(config, *open_digit_pairs(config.data, display))

    def build_model(self) -> nn.Module:
        """Return the encoder, initialised from the run's seed."""
        model = FusionModel(self.config.model, self.config.attention, n_mels=self.config.data.n_mels)
        initialize(model, self.config.seed)
        return model

    def collate(self, samples: Sequence[Sample]) -> Batch:
        """Return images (B, 1, S, S), features (B, T, M) padded with zeros, lengths (B,) and sums (B,)."""
        images, features, sums = zip(*samples, strict=True)
        lengths = torch.tensor([len(rows) for rows in features])
        return torch.stack(images), pad_sequence(features, batch_first=True), lengths, torch.tensor(sums)

    def inputs(self, batch: Batch) -> Batch:
        """Return what the model takes of a batch."""
        return batch[:3]

    def weight(self, batch: Batch) -> float:
        """Every pair is a target."""
        return float(len(batch[0]))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross entropy in nats per pair, with label smoothing in training."""
        smoothing = self.config.model.label_smoothing if model.training else 0.0
        logits = model(*self.inputs(batch)).float()
        return F.cross_entropy(logits, batch[3], label_smoothing=smoothing)

    def evaluate(self, model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        """Return the loss in nats per pair and the share of right sums."""
        nats, hits, count = 0.0, 0, 0
        for batch in batches:
            logits = model(*self.inputs(batch)).float()
            nats += float(F.cross_entropy(logits, batch[3], reduction="sum"))
            hits += int((logits.argmax(1) == batch[3]).sum())
            count += len(batch[3])
        return {"loss": nats / count, "accuracy": hits / count}

    def sample(self, model: nn.Module, size: int) -> str | None:
        """A classifier makes nothing to show."""
        return None
