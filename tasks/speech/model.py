"""Encoders over speech features, and the two ways of reading them out.

Axis legend: B recordings, T frames, M mel bands, C width, K classes. Lengths count what is not padding.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tasks.speech.config import SpeechModelConfig
from xsa_core import Encoder, EncoderConfig, Mask, convert, initialize
from xsa_core.roles import ParameterRole, Role

LONGEST = 2**16  # positions; RoPE needs a bound, not a table


class Subsample(nn.Module):
    """Convolutions over time: `B T M -> B ceil(T / factor) C`. Padding is zero before and after each.

    Args:
        n_mels, width: M and C. factor: 1, 2 or 4.
    """

    def __init__(self, n_mels: int, width: int, factor: int) -> None:
        super().__init__()
        strides = {1: (1,), 2: (2,), 4: (2, 2)}[factor]
        self.layers = nn.ModuleList(
            nn.Conv1d(width if number else n_mels, width, kernel_size=3, stride=stride, padding=1)
            for number, stride in enumerate(strides)
        )

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return hidden states and their lengths."""
        x = features.transpose(1, 2)  # B M T
        for layer in self.layers:
            x = x * real(lengths, x.shape[2])[:, None].to(x.dtype)
            x = F.gelu(layer(x))
            lengths = -(-lengths // layer.stride[0])
        return x.transpose(1, 2), lengths


class ConformerBlocks(nn.Module):
    """torchaudio's Conformer, `B T C -> B T C`.

    Its convolutions and group norms run over padded frames too, as its authors' do; batches of like length
    keep that small.
    """

    def __init__(self, model: SpeechModelConfig) -> None:
        super().__init__()
        from torchaudio.models import Conformer

        self.layers = Conformer(
            model.d_model,
            num_heads=model.n_heads,
            ffn_dim=round(model.d_model * model.mlp_ratio),
            num_layers=model.n_layers,
            depthwise_conv_kernel_size=model.kernel_size,
            dropout=model.dropout,
            use_group_norm=True,
        )

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Encode."""
        return self.layers(x, lengths)[0]


class TransformerBlocks(nn.Module):
    """xsa_core's encoder under the recordings' padding mask, `B T C -> B T C`."""

    def __init__(self, model: SpeechModelConfig, attention) -> None:
        super().__init__()
        config = EncoderConfig(
            n_layers=model.n_layers,
            n_heads=model.n_heads,
            d_model=model.d_model,
            max_seq_len=LONGEST,
            mlp_ratio=model.mlp_ratio,
            dropout=model.dropout,
            **attention.model_dump(),
        )
        self.encoder = Encoder(config)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Encode."""
        mask = None if bool((lengths == x.shape[1]).all()) else Mask.padding(real(lengths, x.shape[1]))
        return self.encoder(x, mask=mask)


class SpeechModel(nn.Module):
    """Features -> logits: of the whole recording (`pooled`), or of every position.

    Args:
        model, attention: config sections. n_mels: M. classes: K.
        pooled: whether the positions are averaged before the head.
    """

    def __init__(
        self, model: SpeechModelConfig, attention, *, n_mels: int, classes: int, pooled: bool
    ) -> None:
        super().__init__()
        self.pooled = pooled
        self.subsample = Subsample(n_mels, model.d_model, model.subsample)
        if model.architecture == "conformer":
            self.blocks: nn.Module = ConformerBlocks(model)
            convert(self.blocks, **attention.model_dump())
        else:
            self.blocks = TransformerBlocks(model, attention)
        self.head = nn.Linear(model.d_model, classes)

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and how many positions are real.

        Args:
            features: `B T M`. lengths: `B` int64, frames that are not padding.

        Returns:
            Logits `B K` if pooled, else `B T' K`; lengths `B` at the encoder's positions.
        """
        x, lengths = self.subsample(features, lengths)
        x = self.blocks(x, lengths)
        if self.pooled:
            weight = real(lengths, x.shape[1])[:, :, None].to(x.dtype)
            x = (x * weight).sum(1) / weight.sum(1)  # B C
        return self.head(x), lengths

    def declared_roles(self) -> dict[str, ParameterRole]:
        """The head is a linear layer, and yet no hidden matrix."""
        return {"head.weight": ParameterRole(Role.HEAD)}


def real(lengths: Tensor, size: int) -> Tensor:
    """Return `B T` bool, True where there is no padding."""
    return torch.arange(size, device=lengths.device) < lengths[:, None]


def build_model(config, *, classes: int, pooled: bool) -> SpeechModel:
    """Return the model of a run, initialised from its seed.

    Raises:
        ValueError: sizes that do not fit together, or an unknown variant.
    """
    n_mels = config.data.n_mels
    try:
        model = SpeechModel(config.model, config.attention, n_mels=n_mels, classes=classes, pooled=pooled)
    except AssertionError as error:
        raise ValueError(f"model: {error}") from error
    initialize(model, config.seed)
    return model
