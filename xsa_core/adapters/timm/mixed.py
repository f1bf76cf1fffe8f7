"""timm's attention whose weights are more than one softmax: heads that talk, gated positions.

No kernel computes such weights, so they are written out as the library has them, and exclusion follows.

    B batch   N tokens   H heads   D channels of a head   C channels   h, w height and width of a map
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from xsa_core.adapters.base import Settings
from xsa_core.adapters.layer import ConvertedLayer
from xsa_core.adapters.timm.common import QkvLayer, as_map, tokens
from xsa_core.attention.functional import exclude
from xsa_core.attention.variants import Call


@dataclass(frozen=True)
class GivenOutput(Call):
    """A call whose attention was computed already.

    Attributes:
        y: `B T H D`, what attention gives.
    """

    y: Tensor | None = None

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        own_v: Tensor | None = None,
        strength: float | Tensor | None = None,
    ) -> Tensor:
        """See the base."""
        assert self.y is not None
        if strength is None:
            return self.y
        return exclude(self.y, (v if own_v is None else own_v).to(self.y.dtype), strength)


class MixedLayer(ConvertedLayer):
    """A layer that computes its weights itself."""

    @staticmethod
    def refuse(settings: Settings) -> str | None:
        """Controls that need other weights than the layer computes."""
        if settings.variant in ("diag_masked", "mean_direction"):
            return f"variant {settings.variant} needs attention weights of its own, which this layer mixes"
        return None

    def exclude(self: Any, q: Tensor, k: Tensor, v: Tensor, weights: Tensor) -> Tensor:
        """Weights `B H N N` and `q, k, v` `B H N D` -> `B N H*D`."""
        q, k, own = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = (weights @ v).transpose(1, 2)
        return self.exclusion(q, k, own, own, GivenOutput(y=y)).flatten(2)


class TalkingLayer(MixedLayer, QkvLayer):
    """`models.cait.TalkingHeadAttn`: heads mix before and after the softmax."""

    def exclusive_forward(self: Any, x: Tensor) -> Tensor:
        """`B N C` -> `B N C`."""
        q, k, v = self.split(x)
        logits = (q * self.scale) @ k.transpose(-2, -1)  # B H N N
        weights = self.proj_l(logits.movedim(1, -1)).softmax(dim=-2)  # B N N H, over keys
        weights = self.attn_drop(self.proj_w(weights).movedim(-1, 1))
        return self.finish(self.exclude(q, k, v, weights))


class TalkingMapLayer(MixedLayer):
    """`models.efficientformer_v2.Attention2d`: the same with convolutions, and a local branch."""

    @staticmethod
    def sizes(module: Any) -> tuple[int, int]:
        """See the base."""
        return module.num_heads, module.d

    def exclusive_forward(self: Any, x: Tensor) -> Tensor:
        """`B C h w` -> `B C h w`."""
        if self.stride_conv is not None:
            x = self.stride_conv(x)
        value = self.v(x)
        q, k, v = (
            tokens(y).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for y in (self.q(x), self.k(x), value)
        )
        logits = (q @ k.transpose(-2, -1)) * self.scale + self.get_attention_biases(x.device)
        weights = self.talking_head2(self.talking_head1(logits).softmax(dim=-1))
        heads = as_map(self.exclude(q, k, v, weights), *self.resolution) + self.v_local(value)
        if self.upsample is not None:
            heads = self.upsample(heads)
        return self.proj(self.act(heads))


class GatedPositionLayer(MixedLayer):
    """`models.convit.GPSA`: content weights and position weights, mixed by a gate per head."""

    @staticmethod
    def sizes(module: Any) -> tuple[int, int]:
        """See the base."""
        return module.num_heads, module.v.out_features // module.num_heads

    def exclusive_forward(self: Any, x: Tensor) -> Tensor:
        """`B N C` -> `B N C`."""
        if self.rel_indices is None or self.rel_indices.shape[1] != x.shape[1]:
            self.rel_indices = self.get_rel_indices(x.shape[1])
        q, k = self.qk(x).unflatten(-1, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        v = self.v(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        content = ((q @ k.transpose(-2, -1)) * self.scale).softmax(dim=-1)  # B H N N
        position = self.pos_proj(self.rel_indices).movedim(-1, 1).softmax(dim=-1)  # 1 H N N
        gate = torch.sigmoid(self.gating_param).view(1, -1, 1, 1)
        weights = (1.0 - gate) * content + gate * position
        weights = self.attn_drop(weights / weights.sum(dim=-1, keepdim=True))
        return self.proj_drop(self.proj(self.exclude(q, k, v, weights)))
