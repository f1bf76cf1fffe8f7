"""Building blocks shared by the decoder and the encoder: configuration, MLP, block, stack.

Axes: B batch, T positions, C channels of the residual stream, H heads, D channels of a head.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from xsa_core.attention.arguments import is_number
from xsa_core.attention.backends import check_backend_name
from xsa_core.attention.cache import KVCache, check_positions, default_positions, unchanged_on_error
from xsa_core.attention.module import (
    SelfAttention,
    check_rope_base,
    check_sinks_and_dropout,
    check_sizes,
    select_layers,
)
from xsa_core.attention.rope import Rotation
from xsa_core.attention.variants import VARIANTS, check_strength
from xsa_core.roles import ParameterRole, Role

if TYPE_CHECKING:
    from xsa_core.attention import Mask


@dataclass(frozen=True, kw_only=True)
class StackConfig:
    """What every Transformer of this library is built from.

    Attributes:
        n_layers, n_heads, d_model: depth, query heads, width C of the residual stream.
        head_dim: D; by default `d_model / n_heads`. Independent of the width when given, as in the paper.
        n_kv_heads: key and value heads (grouped-query attention); by default `n_heads`.
        max_seq_len: longest sequence, cached positions included.
        rope_base: base of the rotary embedding; None for a model without positions.
        rotary_fraction: share of each head's channels that is rotated.
        mlp_ratio: hidden width of the MLP over `d_model`.
        bias: biases in projections and norms.
        qk_norm: RMSNorm of queries and keys per head, before the rotation.
        n_sinks: learned key-value pairs per head that every query may attend.
        variant: a key of `VARIANTS`; `strength` its fixed strength; `layers` where it acts ("all", "first:k",
            "last:k", or a list of indices); other layers are plain attention.
        backend: attention backend, see `xsa_core.attention`.
        dropout: on embedding and residual branches; `attention_dropout`: on attention weights.
        checkpointing: recompute blocks in the backward instead of keeping their activations.
    """

    n_layers: int
    n_heads: int
    d_model: int
    max_seq_len: int
    head_dim: int | None = None
    n_kv_heads: int | None = None
    rope_base: float | None = 10000.0
    rotary_fraction: float = 1.0
    mlp_ratio: float = 4.0
    bias: bool = False
    qk_norm: bool = False
    n_sinks: int = 0
    variant: str = "xsa"
    strength: float = 1.0
    layers: str | Sequence[int] = "all"
    backend: str = "auto"
    dropout: float = 0.0
    attention_dropout: float = 0.0
    norm_eps: float = 1e-5
    checkpointing: bool = False

    def __post_init__(self) -> None:
        names = ("n_layers", "n_heads", "d_model", "max_seq_len", "n_kv_heads", "head_dim")
        check_sizes(**{name: getattr(self, name) for name in names})
        check_sinks_and_dropout(self.n_sinks, self.attention_dropout, "attention_dropout")
        check_backend_name(self.backend)
        if self.head_dim is None and self.d_model % self.n_heads:
            raise ValueError(
                f"d_model {self.d_model} is not a multiple of n_heads {self.n_heads}: give head_dim"
            )
        if self.n_heads % self.value_heads:
            raise ValueError(f"n_heads {self.n_heads} is not a multiple of n_kv_heads {self.n_kv_heads}")
        if self.mlp_ratio <= 0:
            raise ValueError(f"mlp_ratio must be positive, got {self.mlp_ratio}")
        if not is_number(self.dropout) or not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout!r}")
        check_rope_base(self.rope_base)
        fits = 0 < self.rotary_fraction <= 1 and self.rotary_dim % 2 == 0 and self.rotary_dim >= 2
        if self.rope_base is not None and not fits:
            raise ValueError(
                f"rotary_fraction {self.rotary_fraction} of head size {self.head_size} leaves "
                f"{self.rotary_dim} channels to rotate: expected an even number of at least 2"
            )
        if self.variant not in VARIANTS:
            raise ValueError(
                f"unknown attention variant {self.variant!r}: expected one of {', '.join(VARIANTS)}"
            )
        check_strength(self.variant, self.strength)
        select_layers(self.layers, self.n_layers)
        if not isinstance(self.layers, str):
            object.__setattr__(
                self, "layers", tuple(self.layers)
            )  # hashable, and equal after a JSON round trip

    @property
    def head_size(self) -> int:
        """D, whether given or derived."""
        return self.head_dim or self.d_model // self.n_heads

    @property
    def value_heads(self) -> int:
        """Key and value heads, whether given or derived."""
        return self.n_kv_heads or self.n_heads

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that are rotated."""
        return round(self.head_size * self.rotary_fraction)

    @property
    def mlp_width(self) -> int:
        """Hidden width of the MLP."""
        return round(self.d_model * self.mlp_ratio)


def make_norm(config: StackConfig) -> nn.LayerNorm:
    """LayerNorm over C; without bias where the configuration has none."""
    return nn.LayerNorm(config.d_model, eps=config.norm_eps, bias=config.bias)


class MLP(nn.Module):
    """Two projections with GELU between, `B T C -> B T C`."""

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.d_model, config.mlp_width, bias=config.bias)
        self.down = nn.Linear(config.mlp_width, config.d_model, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """`B T C -> B T C`."""
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Pre-norm block: `x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(self, config: StackConfig, layer: int, *, causal: bool) -> None:
        super().__init__()
        selected = layer in select_layers(config.layers, config.n_layers)
        variant = config.variant if selected else "sa"
        self.attention_norm = make_norm(config)
        self.attention = SelfAttention(
            config.d_model,
            config.n_heads,
            config.n_kv_heads,
            config.head_size,
            variant=variant,
            strength=config.strength if VARIANTS[variant].takes_strength else 1.0,
            causal=causal,
            rope_base=config.rope_base,
            rotary_dim=config.rotary_dim if config.rope_base is not None else None,
            bias=config.bias,
            qk_norm=config.qk_norm,
            n_sinks=config.n_sinks,
            dropout=config.attention_dropout,
            backend=config.backend,
        )
        self.mlp_norm = make_norm(config)
        self.mlp = MLP(config)
        self.dropout = config.dropout

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | None = None,
        mask: Mask | None = None,
        cache: object | None = None,
    ) -> Tensor:
        """`B T C -> B T C`; arguments as for `SelfAttention.forward`."""
        branch = self.attention(self.attention_norm(x), rotation=rotation, mask=mask, cache=cache)
        x = x + self._drop(branch)
        return x + self._drop(self.mlp(self.mlp_norm(x)))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class Stack(nn.ModuleList):
    """The blocks of a model, with what they share: positions are turned into one rotation for all layers."""

    def __init__(self, config: StackConfig, *, causal: bool) -> None:
        super().__init__([Block(config, layer, causal=causal) for layer in range(config.n_layers)])
        self.config = config

    def forward(
        self,
        x: Tensor,
        *,
        mask: Mask | None = None,
        positions: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Run all blocks.

        Args:
            x: `B T C`.
            mask: who may attend whom, see `SelfAttention.forward`.
            positions: `T` or `B T` int64; by default they follow those in the cache.
            cache: keys and values of earlier positions; extended in place. After an error it is as it was.

        Returns:
            `B T C`.

        Raises:
            ValueError: the sequence is longer than `max_seq_len`, or the cache has another number of layers.
        """
        seen = len(cache) if cache is not None else 0
        if seen + x.shape[1] > self.config.max_seq_len:
            raise ValueError(
                f"a sequence of {seen + x.shape[1]} positions is longer than max_seq_len "
                f"{self.config.max_seq_len}: shorten it or build the model for more"
            )
        if cache is not None and len(cache.layers) != len(self):
            raise ValueError(f"cache for {len(cache.layers)} layers given to a model of {len(self)}")
        rotation = None
        if self.config.rope_base is not None:
            if positions is None:
                positions = default_positions(x.shape[1], seen, x.device)
            else:
                check_positions(positions, *x.shape[:2])
            rotation = Rotation(positions, self.config.rotary_dim, self.config.rope_base, x.dtype)
        recompute = self.config.checkpointing and self.training and torch.is_grad_enabled() and cache is None
        with contextlib.nullcontext() if cache is None else unchanged_on_error(cache):
            for layer, block in enumerate(self):
                if recompute:
                    x = checkpoint(block, x, rotation, mask, use_reentrant=False)
                else:
                    x = block(x, rotation, mask, cache.layers[layer] if cache is not None else None)
        return x

    def declared_roles(self) -> dict[str, ParameterRole]:
        """Residual projections are told apart: their initial scale falls with depth (see `initialize`)."""
        role = ParameterRole(Role.HIDDEN_MATRIX, residual_branches=2 * len(self))
        return {
            f"{layer}.{name}": role
            for layer in range(len(self))
            for name in ("attention.out.weight", "mlp.down.weight")
        }
