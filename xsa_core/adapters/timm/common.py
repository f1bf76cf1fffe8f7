"""What the layers of timm share.

B batch   N tokens   H heads   D channels of a head   C channels   h, w height and width of a map
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from xsa_core.adapters.layer import ConvertedLayer

SUBSAMPLED_QUERIES = "subsampled", "queries are pooled: an output belongs to several tokens"


class QkvLayer(ConvertedLayer):
    """A layer with one projection `qkv`, an output projection `proj` and the dropouts of both."""

    @staticmethod
    def sizes(module: Any) -> tuple[int, int]:
        """See the base."""
        return module.num_heads, module.qkv.weight.shape[0] // (3 * module.num_heads)

    def split(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`B N C` -> queries, keys and values `B H N D`."""
        return split_heads(self.qkv(x), self.num_heads)

    def drop(self: Any) -> float:
        """Dropout of attention weights."""
        return self.attn_drop.p

    def finish(self: Any, heads: Tensor) -> Tensor:
        """Output projection of `B N H*D`."""
        return self.proj_drop(self.proj(heads))


def split_heads(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """`B N 3*H*D` -> three times `B H N D`."""
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def split_sizes(qkv: Tensor, heads: int, sizes: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """`B N H*(Dk+Dk+Dv)`, heads outermost -> queries, keys, values `B H N D`."""
    q, k, v = qkv.unflatten(-1, (heads, -1)).transpose(1, 2).split(tuple(sizes), dim=-1)
    return q, k, v


def tokens(x: Tensor) -> Tensor:
    """A map `B C h w` as tokens `B N C`."""
    return x.flatten(2).transpose(1, 2)


def as_map(x: Tensor, h: int, w: int) -> Tensor:
    """Tokens `B N C` as a map `B C h w`."""
    return x.transpose(1, 2).unflatten(2, (h, w))


def window_bias(bias: Tensor, mask: Tensor | None, windows: int) -> Tensor:
    """Relative position bias and the mask of shifted windows together.

    Args:
        bias: `1 H N N`. mask: `W N N` additive, for the W windows of one image, or None. windows: B*W.

    Returns:
        `1 H N N` or `B*W H N N`.
    """
    if mask is None:
        return bias
    mask = mask.unsqueeze(1).repeat(windows // mask.shape[0], 1, 1, 1)  # B*W 1 N N
    return bias + mask


def cosine_queries_and_keys(q: Tensor, k: Tensor, logit_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine attention as dot products of scale 1; `logit_scale` is log, `H 1 1`."""
    factor = torch.clamp(logit_scale, max=math.log(1.0 / 0.01)).exp()
    return F.normalize(q, dim=-1) * factor, F.normalize(k, dim=-1)


def biased_projection(layer: Any, x: Tensor) -> Tensor:
    """`qkv` with a bias for queries and values that is kept apart, as BEiT has it. `B N C` -> `B N 3*H*D`."""
    if layer.q_bias is None:
        return layer.qkv(x)
    bias = torch.cat((layer.q_bias, layer.k_bias, layer.v_bias))
    if layer.qkv_bias_separate:
        return layer.qkv(x) + bias
    return F.linear(x, layer.qkv.weight, bias)
