"""timm's attention over feature maps.

B batch   N tokens   H heads   D channels of a head   C channels   h, w height and width of a map
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
    as_map,
    split_heads,
    split_sizes,
    tokens,
)


class MapLayer(QkvLayer):
    """`layers.Attention2d`, MaxViT's and Visformer's: `qkv` is a convolution."""

    head_first = False  # whether the heads or the three of q, k, v come first; most tell on the instance

    def map_bias(self: Any, given: Tensor | None) -> Tensor | None:
        """Mask or bias of the logits."""
        return given

    def exclusive_forward(self: Any, x: Tensor, given: Tensor | None = None) -> Tensor:
        """`B C h w` -> `B C h w`."""
        h, w = x.shape[-2:]
        qkv = tokens(self.qkv(x))  # B N 3*H*D
        if self.head_first:
            q, k, v = qkv.unflatten(-1, (self.num_heads, -1)).transpose(1, 2).chunk(3, dim=-1)
        else:
            q, k, v = split_heads(qkv, self.num_heads)
        heads = self.attend(q, k, v, bias=self.map_bias(given), dropout_p=self.drop())
        return self.finish(as_map(heads, h, w))


class Attention2dLayer(MapLayer):
    """`layers.Attention2d`."""

    def exclusive_forward(self: Any, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """`B C h w` -> `B C h w`."""
        return super().exclusive_forward(x, attn_mask)


class MaxxvitLayer(MapLayer):
    """`models.maxxvit.Attention2d`."""

    def map_bias(self: Any, given: Tensor | None) -> Tensor | None:
        """See the base."""
        return given if self.rel_pos is None else self.rel_pos.get_bias()

    def exclusive_forward(self: Any, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        """`B C h w` -> `B C h w`."""
        return super().exclusive_forward(x, shared_rel_pos)


class MaxxvitLastLayer(MaxxvitLayer):
    """`models.maxxvit.AttentionCl`: channels last."""

    def exclusive_forward(self: Any, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        """`B .. C` -> `B .. C`."""
        qkv = self.qkv(x).flatten(1, -2)  # B N 3*H*D
        if self.head_first:
            q, k, v = qkv.unflatten(-1, (self.num_heads, -1)).transpose(1, 2).chunk(3, dim=-1)
        else:
            q, k, v = split_heads(qkv, self.num_heads)
        heads = self.attend(q, k, v, bias=self.map_bias(shared_rel_pos), dropout_p=self.drop())
        return self.finish(heads.unflatten(1, x.shape[1:-1]))


class MultiQueryLayer(ConvertedLayer):
    """`layers.MultiQueryAttention2d`: all heads share one key and one value."""

    @staticmethod
    def sizes(module: Any) -> tuple[int, int]:
        """See the base."""
        return module.num_heads, module.value_dim

    @staticmethod
    def exception(module: Any) -> tuple[str, str] | None:
        """Strides of keys or of queries."""
        if module.has_query_strides:
            return SUBSAMPLED_QUERIES
        return ("subsampled", "") if module.kv_stride > 1 else None

    def exclusive_forward(self: Any, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """`B C h w` -> `B C h w`."""
        h, w = x.shape[-2:]
        q = tokens(self.query(x)).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # B H N D
        k, v = (tokens(p(x)).unsqueeze(1) for p in (self.key, self.value))  # B 1 N D
        heads = self.attend(q, k, v, bias=attn_mask, dropout_p=self.attn_drop.p)
        return self.output(as_map(heads, h, w).contiguous())


class LevitLayer(ConvertedLayer):
    """`models.levit.Attention`: tokens or a map, a bias per offset."""

    @staticmethod
    def sizes(module: Any) -> tuple[int, int]:
        """See the base."""
        return module.num_heads, module.val_dim

    def exclusive_forward(self: Any, x: Tensor) -> Tensor:
        """`B N C` -> `B N C`, or `B C h w` -> `B C h w`."""
        qkv = tokens(self.qkv(x)) if self.use_conv else self.qkv(x)
        sizes = (self.key_dim, self.key_dim, self.val_dim)
        q, k, v = split_sizes(qkv, self.num_heads, sizes)
        heads = self.attend(q, k, v, bias=self.get_attention_biases(x.device))
        return self.proj(as_map(heads, *x.shape[-2:]) if self.use_conv else heads)


class CascadedLayer(ConvertedLayer):
    """`models.efficientvit_msra.CascadedGroupAttention`: a head sees what the head before it made.

    Heads follow each other, each an attention of one head: what a variant learns is shared by them.
    """

    @staticmethod
    def sizes(module: Any) -> tuple[int, int]:
        """See the class."""
        return 1, module.val_dim

    def exclusive_forward(self: Any, x: Tensor) -> Tensor:
        """`B C h w` -> `B C h w`."""
        h, w = x.shape[-2:]
        biases = self.get_attention_biases(x.device)  # H N N
        parts = x.chunk(len(self.qkvs), dim=1)
        out: list[Tensor] = []
        for part, qkv, kernel, bias in zip(parts, self.qkvs, self.dws, biases, strict=True):
            made = qkv(part + out[-1] if out else part)
            q, k, v = made.split((self.key_dim, self.key_dim, self.val_dim), dim=1)
            q, k, v = (tokens(y).unsqueeze(1) for y in (kernel(q), k, v))  # B 1 N D
            out.append(as_map(self.attend(q, k, v, bias=bias), h, w))
        return self.proj(torch.cat(out, dim=1))


class FastvitLayer(QkvLayer):
    """`models.fastvit.Attention`: a map through linear projections."""

    def exclusive_forward(self: Any, x: Tensor) -> Tensor:
        """`B C h w` -> `B C h w`."""
        heads = self.attend(*self.split(tokens(x)), dropout_p=self.drop())
        return as_map(self.finish(heads), *x.shape[-2:])


class SingleHeadLayer(ConvertedLayer):
    """`models.shvit.SHSA`: one head over a part of the channels."""

    @staticmethod
    def sizes(module: Any) -> tuple[int, int]:
        """See the base."""
        return 1, module.pdim

    def exclusive_forward(self: Any, x: Tensor) -> Tensor:
        """`B C h w` -> `B C h w`."""
        seen, rest = x.split((self.pdim, self.dim - self.pdim), dim=1)
        qkv = tokens(self.qkv(self.pre_norm(seen)))
        q, k, v = split_sizes(qkv, 1, (self.qk_dim, self.qk_dim, self.pdim))
        return self.proj(torch.cat([as_map(self.attend(q, k, v), *x.shape[-2:]), rest], dim=1))


class ModulationLayer(ConvertedLayer):
    """`models.iformer.SHMA`: one head, its output times a gate, in windows where they are set."""

    @staticmethod
    def sizes(module: Any) -> tuple[int, int]:
        """See the base."""
        return 1, module.proj.conv.in_channels if hasattr(module.proj, "conv") else module.proj[0].in_channels

    def exclusive_forward(self: Any, x: Tensor) -> Tensor:
        """`B C h w` -> `B C h w`."""
        h, w = x.shape[-2:]
        size = self.window_size
        if size:
            x = F.pad(x, (0, -w % size, 0, -h % size))
            padded = x.shape[-2:]
            x = self._window_partition(x, size)
        v, gate = self.gate_act(self.v_gate(x)).chunk(2, dim=1)
        q, k, v = (tokens(y).unsqueeze(1) for y in (self.q(x), self.k(x), v))  # B 1 N D
        heads = as_map(self.attend(q, k, v, dropout_p=self.attn_drop.p), *x.shape[-2:])
        y = self.proj(heads * gate)
        return self._window_reverse(y, size, *padded)[..., :h, :w].contiguous() if size else y


class StridedMapLayer(ConvertedLayer):
    """`ConvAttention` of LowFormer and CPUBone: attention on a coarser map, whose tokens are its own."""

    @staticmethod
    def sizes(module: Any) -> tuple[int, int]:
        """See the base."""
        return module.num_heads, module.head_dim

    def exclusive_forward(self: Any, x: Tensor) -> Tensor:
        """`B C h w` -> `B C h w`."""
        h, w = x.shape[-2:]
        if getattr(self, "small_kernels", False) and self.att_stride > 1:
            x = F.pad(x, (0, -w % self.att_stride, 0, -h % self.att_stride))
        qkv = self.pwise(self.conv_proj(x))
        q, k, v = tokens(qkv).unflatten(-1, (self.num_heads, -1)).transpose(1, 2).chunk(3, dim=-1)
        heads = as_map(self.attend(q, k, v), *qkv.shape[-2:])
        return self.upsampling(self.o_proj(heads))[..., :h, :w]


class VoloLayer(QkvLayer):
    """`models.volo.Attention` and Hiera's second version: a map with channels last."""

    def exclusive_forward(self: Any, x: Tensor) -> Tensor:
        """`B h w C` -> `B h w C`."""
        heads = self.attend(*self.split(x.flatten(1, 2)), dropout_p=self.drop())
        return self.finish(heads.unflatten(1, x.shape[1:3]))


class HieradetLayer(VoloLayer):
    """`models.hieradet_sam2.MultiScaleAttention`."""

    @staticmethod
    def exception(module: Any) -> tuple[str, str] | None:
        """Where a stage begins."""
        return None if module.q_pool is None else SUBSAMPLED_QUERIES

    def drop(self: Any) -> float:
        """None."""
        return 0.0

    def finish(self: Any, heads: Tensor) -> Tensor:
        """See the base."""
        return self.proj(heads)


class UnpooledLayer(ConvertedLayer):
    """Layers that may pool keys and values (PVT, Twins, Next-ViT), where they do not."""

    @staticmethod
    def sizes(module: Any) -> tuple[int, int]:
        """See the base."""
        return module.num_heads, module.proj.in_features // module.num_heads

    @staticmethod
    def exception(module: Any) -> tuple[str, str] | None:
        """All but the last stages."""
        pooled = module.sr is not None or getattr(module, "pool", None) is not None
        return ("subsampled", "") if pooled else None

    def exclusive_forward(self: Any, x: Tensor, size: Any = None) -> Tensor:
        """`B N C` -> `B N C`."""
        q = self.q(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        if hasattr(self, "kv"):
            k, v = self.kv(x).unflatten(-1, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            k, v = (p(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for p in (self.k, self.v))
        return self.proj_drop(self.proj(self.attend(q, k, v, dropout_p=self.attn_drop.p)))


class PvtLayer(UnpooledLayer):
    """`models.pvt_v2.Attention`."""

    def exclusive_forward(self: Any, x: Tensor, feat_size: Any = None) -> Tensor:
        """See the base."""
        return super().exclusive_forward(x)


class BottleneckLayer(ConvertedLayer):
    """`layers.BottleneckAttn`: position logits that depend on the query; a pooling may follow."""

    @staticmethod
    def sizes(module: Any) -> tuple[int, int]:
        """See the base."""
        return module.num_heads, module.dim_head_v

    def exclusive_forward(self: Any, x: Tensor) -> Tensor:
        """`B C h w` -> `B C h w`."""
        split = self.qkv(x).split((self.dim_out_qk, self.dim_out_qk, self.dim_out_v), dim=1)
        q, k, v = (tokens(y).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in split)
        bias = self.pos_embed(q.flatten(0, 1)).unflatten(0, q.shape[:2])  # B H N N
        bias = bias * self.scale if self.scale_pos_embed else bias
        heads = self.attend(q, k, v, bias=bias, scale=self.scale)
        return self.pool(as_map(heads, *x.shape[-2:]))
