"""A bidirectional Transformer over features: the encoder of the speech and early-fusion models.

Axes: B batch, T frames, C width.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor, nn

from xsa_core.attention.masks import Mask
from xsa_core.checkpoint_io import load_model, save_model
from xsa_core.layers import Stack, StackConfig, make_norm


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(StackConfig):
    """An encoder; see `StackConfig`.

    Attributes:
        input_norm: LayerNorm before the first block, the encoder's counterpart of the decoder's norm after
            the embedding.
        causal: whether a frame sees only earlier ones (streaming).
    """

    input_norm: bool = True
    causal: bool = False


class Encoder(nn.Module):
    """Blocks between two norms, `B T C -> B T C`. What makes the features and what reads the result is the
    task's.

    Args:
        config: sizes and variant. Weights are torch's defaults until `xsa_core.initialize(model, seed)`.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.input_norm = make_norm(config) if config.input_norm else nn.Identity()
        self.blocks = Stack(config, causal=config.causal)
        self.final_norm = make_norm(config)

    def forward(self, x: Tensor, *, mask: Mask | None = None, positions: Tensor | None = None) -> Tensor:
        """Encode.

        Args:
            x: `B T C`.
            mask: e.g. `Mask.padding(real)` for sequences of several lengths.
            positions: `T` or `B T` int64; 0 .. T-1 by default.

        Returns:
            `B T C`; rows of padding hold no meaning.

        Raises:
            ValueError: another width, or a sequence longer than `max_seq_len`.
        """
        if x.ndim != 3 or x.shape[-1] != self.config.d_model:
            raise ValueError(f"expected features (B, T, {self.config.d_model}), got {tuple(x.shape)}")
        x = self.input_norm(x)
        if self.config.dropout:
            x = F.dropout(x, self.config.dropout, self.training)
        return self.final_norm(self.blocks(x, mask=mask, positions=positions))

    def num_parameters(self) -> int:
        """Number of parameters."""
        return sum(p.numel() for p in self.parameters())

    def save_pretrained(self, directory: str | Path) -> None:
        """Write `model.safetensors` and `config.json`, each whole."""
        save_model(self, self.config, directory)

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> Encoder:
        """The encoder that `save_pretrained` wrote, in evaluation mode.

        Raises:
            ValueError: not such a directory, or damaged; the message says what.
        """
        return load_model(cls, EncoderConfig, directory)
