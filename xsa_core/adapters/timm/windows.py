"""timm's attention within windows: those the caller made, and those the layer makes itself.

B batch   W windows of an image   N tokens   H heads   D channels of a head   C channels
h, w height and width of a map
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from xsa_core.adapters.layer import ConvertedLayer
from xsa_core.adapters.timm.common import (
    SUBSAMPLED_QUERIES,
    QkvLayer,
    biased_projection,
    cosine_queries_and_keys,
    split_heads,
    window_bias,
)
from xsa_core.adapters.timm.tokens import SimpleLayer


class DavitLayer(SimpleLayer):
    """`models.davit.WindowAttention`: without dropouts."""

    def drop(self: Any) -> float:
        """None."""
        return 0.0

    def finish(self: Any, heads: Tensor) -> Tensor:
        """See the base."""
        return self.proj(heads)


class SwinLayer(QkvLayer):
    """`models.swin_transformer.WindowAttention`."""

    def exclusive_forward(self: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """`B*W N C` -> `B*W N C`."""
        bias = window_bias(self._get_rel_pos_bias(), mask, x.shape[0])
        return self.finish(self.attend(*self.split(x), bias=bias, dropout_p=self.drop()))


class SwinV2Layer(QkvLayer):
    """`models.swin_transformer_v2.WindowAttention`: cosine attention, positions through a small network."""

    def position_bias(self: Any) -> Tensor:
        """`1 H N N`."""
        n = self.window_size[0] * self.window_size[1]
        table = self.cpb_mlp(self.relative_coords_table).view(-1, self.num_heads)
        bias = table[self.relative_position_index.view(-1)].view(n, n, -1).permute(2, 0, 1)
        return 16 * torch.sigmoid(bias).unsqueeze(0)

    def exclusive_forward(self: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """`B*W N C` -> `B*W N C`."""
        q, k, v = split_heads(biased_projection(self, x), self.num_heads)
        q, k = cosine_queries_and_keys(q, k, self.logit_scale)
        bias = window_bias(self.position_bias(), mask, x.shape[0])
        return self.finish(self.attend(q, k, v, bias=bias, scale=1.0, dropout_p=self.drop()))


class SwinV2CrLayer(QkvLayer):
    """`models.swin_transformer_v2_cr.WindowMultiHeadAttention`."""

    def exclusive_forward(self: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """`B*W N C` -> `B*W N C`."""
        q, k, v = self.split(x)
        q, k = cosine_queries_and_keys(q, k, self.logit_scale.view(-1, 1, 1))
        bias = window_bias(self._relative_positional_encodings(), mask, x.shape[0])
        return self.finish(self.attend(q, k, v, bias=bias, scale=1.0, dropout_p=self.drop()))


class GcvitLayer(QkvLayer):
    """`models.gcvit.WindowAttentionGlobal` where its queries are its own."""

    @staticmethod
    def exception(module: Any) -> tuple[str, str] | None:
        """Global queries are pooled from the whole image."""
        if module.use_global:
            return "cross", "its queries are pooled from the whole image: they have no own value"
        return None

    def exclusive_forward(self: Any, x: Tensor, q_global: Tensor | None = None) -> Tensor:
        """`B*W N C` -> `B*W N C`."""
        heads = self.attend(*self.split(x), bias=self.rel_pos.get_bias(), dropout_p=self.drop())
        return self.finish(heads)


class SamLayer(QkvLayer):
    """`models.vision_transformer_sam.Attention`: position bias that depends on the query, or rotation."""

    def exclusive_forward(self: Any, x: Tensor) -> Tensor:
        """`B h w C` -> `B h w C`."""
        from timm.layers import apply_rot_embed_cat
        from timm.models.vision_transformer_sam import get_decomposed_rel_pos_bias

        size = tuple(x.shape[1:3])
        q, k, v = self.split(x.flatten(1, 2))
        q, k = self.q_norm(q), self.k_norm(k)
        bias = None
        if self.use_rel_pos:
            flat = q.flatten(0, 1)  # B*H N D
            bias = get_decomposed_rel_pos_bias(flat, self.rel_pos_h, self.rel_pos_w, size, size)
            bias = bias.unflatten(0, q.shape[:2])
        elif self.rope is not None:
            rope = self.rope.get_embed()
            q, k = apply_rot_embed_cat(q, rope).type_as(v), apply_rot_embed_cat(k, rope).type_as(v)
        heads = self.attend(q, k, v, bias=bias, dropout_p=self.drop())
        return self.finish(heads.unflatten(1, size))


class HieraLayer(ConvertedLayer):
    """`models.hiera.MaskUnitAttention`, within mask units or over all."""

    @staticmethod
    def sizes(module: Any) -> tuple[int, int]:
        """See the base."""
        return module.heads, module.head_dim

    @staticmethod
    def exception(module: Any) -> tuple[str, str] | None:
        """Where a stage begins."""
        return SUBSAMPLED_QUERIES if module.q_stride > 1 else None

    def exclusive_forward(self: Any, x: Tensor) -> Tensor:
        """`B N C` -> `B N C`; the tokens of a mask unit are a stride apart."""
        if not self.use_mask_unit_attn:
            return self.proj(self.attend(*split_heads(self.qkv(x), self.heads)))
        units = x.shape[1] // self.window_size
        qkv = self.qkv(x).unflatten(1, (-1, units)).transpose(1, 2)  # B units n 3*H*D
        heads = self.attend(*split_heads(qkv.flatten(0, 1), self.heads))  # B*units n C
        return self.proj(heads.unflatten(0, (-1, units)).transpose(1, 2).flatten(1, 2))


class NestLayer(QkvLayer):
    """`models.nest.Attention`: image blocks as an axis of their own."""

    def exclusive_forward(self: Any, x: Tensor) -> Tensor:
        """`B blocks N C` -> `B blocks N C`. Channels of the output are those of a head, then heads."""
        heads = self.attend(*self.split(x.flatten(0, 1)), dropout_p=self.drop())
        mixed = heads.unflatten(-1, (self.num_heads, -1)).transpose(-1, -2).flatten(-2)
        return self.finish(mixed.unflatten(0, x.shape[:2]))


class TwinsLocalLayer(QkvLayer):
    """`models.twins.LocallyGroupedAttn`: the layer cuts the map into windows, padded with zeros."""

    def exclusive_forward(self: Any, x: Tensor, size: Any) -> Tensor:
        """`B N C` -> `B N C`."""
        (h, w), s = size, self.ws
        x = F.pad(x.unflatten(1, (h, w)), (0, 0, 0, -w % s, 0, -h % s))
        x = x.unflatten(2, (-1, s)).unflatten(1, (-1, s)).transpose(2, 3)  # B rows columns s s C
        grid = x.shape[:3]
        heads = self.attend(*self.split(x.flatten(3, 4).flatten(0, 2)), dropout_p=self.drop())
        heads = heads.unflatten(1, (s, s)).unflatten(0, grid).transpose(2, 3)
        heads = heads.flatten(3, 4).flatten(1, 2)[:, :h, :w]
        return self.finish(heads.flatten(1, 2))
