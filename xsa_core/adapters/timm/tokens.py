"""timm's attention over one sequence of tokens.

B batch   N tokens   H heads   D channels of a head   C channels
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from xsa_core.adapters.layer import ConvertedLayer
from xsa_core.adapters.timm.common import QkvLayer, biased_projection, split_heads, split_sizes


class PlainLayer(QkvLayer):
    """`layers.Attention`, of most Vision Transformers."""

    def exclusive_forward(
        self: Any, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """`B N C` -> `B N C`."""
        q, k, v = self.split(x)
        q, k = self.q_norm(q), self.k_norm(k)
        bias = None if is_causal else attn_mask
        heads = self.norm(self.attend(q, k, v, bias=bias, causal=is_causal, dropout_p=self.drop()))
        if self.gate is not None:
            heads = heads * self.gate(x).sigmoid()
        return self.finish(heads)


class RotaryLayer(QkvLayer):
    """`layers.AttentionRope` and EVA's: rotary positions, separate projections, grouped heads, a gate."""

    @staticmethod
    def sizes(module: Any) -> tuple[int, int]:
        """See the base."""
        return module.num_heads, module.head_dim

    def split(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`B N C` -> `B H N D`, `B Hkv N D`, `B Hkv N D`."""
        if self.qkv is not None:
            return split_heads(self.projected(x), self.num_heads)
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def projected(self: Any, x: Tensor) -> Tensor:
        """`B N C` -> `B N 3*H*D`."""
        return self.qkv(x)

    def rotate(self: Any, x: Tensor, rope: Tensor) -> Tensor:
        """All but the prefix tokens, `B H N D`."""
        from timm.layers import apply_rot_embed_cat

        prefix = self.num_prefix_tokens
        rotated = apply_rot_embed_cat(x[:, :, prefix:], rope, half=getattr(self, "rotate_half", False))
        return torch.cat([x[:, :, :prefix], rotated], dim=2)

    def exclusive_forward(
        self: Any,
        x: Tensor,
        rope: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """`B N C` -> `B N C`."""
        q, k, v = self.split(x)
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = self.rotate(q, rope).type_as(v), self.rotate(k, rope).type_as(v)
        bias = None if is_causal else attn_mask
        heads = self.norm(self.attend(q, k, v, bias=bias, causal=is_causal, dropout_p=self.drop()))
        if self.gate is not None:
            heads = heads * self.gate(x).sigmoid()
        return self.finish(heads)


class EvaLayer(RotaryLayer):
    """`models.eva.EvaAttention`."""

    def projected(self: Any, x: Tensor) -> Tensor:
        """See the base."""
        return biased_projection(self, x)


class BeitLayer(QkvLayer):
    """`models.beit.Attention`: relative position bias, of its own or shared."""

    def exclusive_forward(self: Any, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        """`B N C` -> `B N C`."""
        q, k, v = split_heads(biased_projection(self, x), self.num_heads)
        bias = shared_rel_pos_bias
        if self.relative_position_bias_table is not None:
            own = self._get_rel_pos_bias()  # 1 H N N
            bias = own if bias is None else own + bias
        return self.finish(self.attend(q, k, v, bias=bias, dropout_p=self.drop()))


class RelativeLayer(QkvLayer):
    """`models.vision_transformer_relpos.RelPosAttention`."""

    def exclusive_forward(self: Any, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        """`B N C` -> `B N C`."""
        q, k, v = self.split(x)
        bias = shared_rel_pos if self.rel_pos is None else self.rel_pos.get_bias()
        heads = self.attend(self.q_norm(q), self.k_norm(k), v, bias=bias, dropout_p=self.drop())
        return self.finish(heads)


class SimpleLayer(QkvLayer):
    """No masks, no biases, no norms: MetaFormer and ConViT's MHSA."""

    def exclusive_forward(self: Any, x: Tensor) -> Tensor:
        """`B N C` -> `B N C`."""
        return self.finish(self.attend(*self.split(x), dropout_p=self.drop()))


class TntLayer(QkvLayer):
    """`models.tnt.Attention`: values of another size than keys."""

    @staticmethod
    def sizes(module: Any) -> tuple[int, int]:
        """See the base."""
        return module.num_heads, module.v.out_features // module.num_heads

    def exclusive_forward(self: Any, x: Tensor) -> Tensor:
        """`B N C` -> `B N C`."""
        q, k = self.qk(x).unflatten(-1, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        v = self.v(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        return self.finish(self.attend(q, k, v, dropout_p=self.drop()))


class Gemma4Layer(ConvertedLayer):
    """`models.gemma4_vit.Gemma4Attention`: normed values, rotation in two dimensions, grouped heads."""

    @staticmethod
    def sizes(module: Any) -> tuple[int, int]:
        """See the base."""
        return module.num_heads, module.head_dim

    def exclusive_forward(
        self: Any, x: Tensor, rope_cos: Tensor, rope_sin: Tensor, attn_mask: Tensor | None = None
    ) -> Tensor:
        """`B N C` -> `B N C`."""
        from timm.models.gemma4_vit import apply_multidimensional_rope

        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = self.q_norm(q), self.k_norm(k), self.v_norm(v)  # B N H D
        q, k = (apply_multidimensional_rope(y, rope_cos, rope_sin, ndim=2, unsqueeze_dim=2) for y in (q, k))
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        heads = self.attend(q, k, v, bias=attn_mask, scale=1.0, dropout_p=self.attn_drop.p)
        return self.proj_drop(self.o_proj(heads))


class DifferentialLayer(QkvLayer):
    """`layers.DiffAttention`: two attentions over the same values, subtracted.

    Exclusion is linear in the output and both share the value, so each is made exclusive by itself: one
    call with the heads of both, and two value heads for each pair.
    """

    @staticmethod
    def sizes(module: Any) -> tuple[int, int]:
        """Query heads of both."""
        return 2 * module.num_heads, 2 * module.head_dim

    def difference(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """Projections `B N C` each -> heads `B N C`, with the norm and the factor after them."""
        q, k = (y.unflatten(-1, (2 * self.num_heads, -1)).transpose(1, 2) for y in (q, k))
        v = v.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        q, k, v = self.q_norm(q), self.k_norm(k), v.repeat_interleave(2, dim=1)  # B 2H N D
        bias = None if causal or mask is None else self.for_both(mask)
        heads = self.attend(q, k, v, bias=bias, causal=causal, dropout_p=self.attn_drop_p)
        first, second = heads.unflatten(-1, (self.num_heads, 2, -1)).unbind(3)  # B N H D
        heads = first - self._compute_lambda().type_as(q) * second
        return (self.sub_norm(heads) * (1 - self.lambda_init)).flatten(2)

    def for_both(self: Any, mask: Tensor) -> Tensor:
        """A mask `.. H N N` or `.. 1 N N` for twice the heads."""
        one_per_head = mask.dim() > 2 and mask.shape[-3] == self.num_heads > 1
        return mask.repeat_interleave(2, dim=-3) if one_per_head else mask

    def exclusive_forward(
        self: Any, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """`B N C` -> `B N C`."""
        heads = self.difference(*self.qkv(x).chunk(3, dim=2), attn_mask, is_causal)
        return self.finish(self.norm(heads))


class ParallelLayer(ConvertedLayer):
    """`models.vision_transformer.ParallelScalingBlock`: one matrix for the block's MLP and its attention."""

    @staticmethod
    def sizes(module: Any) -> tuple[int, int]:
        """See the base."""
        return module.num_heads, module.head_dim

    def heads(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """Projections `B N C` each -> `B N C`."""
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in (q, k, v))
        bias = None if causal else mask
        q, k = self.q_norm(q), self.k_norm(k)
        return self.attend(q, k, v, bias=bias, causal=causal, dropout_p=self.attn_drop.p)

    def exclusive_forward(
        self: Any, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """`B N C` -> `B N C`, residual included."""
        hidden, q, k, v = torch.split(self.in_proj(self.in_norm(x)), self.in_split, dim=-1)
        if self.mlp_bias is not None:
            hidden = hidden + self.mlp_bias
        heads = self.heads(q, k, v, attn_mask, is_causal)
        hidden = self.mlp_drop(self.mlp_act(hidden))
        if self.out_proj is not None:
            y = self.out_proj(torch.cat((heads, hidden), dim=-1))
        else:
            y = self.attn_out_proj(heads) + self.mlp_out_proj(hidden)
        return x + self.drop_path(self.ls(y))


class DifferentialParallelLayer(ParallelLayer):
    """`models.vision_transformer.DiffParallelScalingBlock`."""

    sizes = staticmethod(DifferentialLayer.sizes)
    difference = DifferentialLayer.difference
    for_both = DifferentialLayer.for_both

    def heads(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """See the base."""
        return self.difference(q, k, v, mask, causal)


class RatioLayer(ConvertedLayer):
    """`models.efficientformer.Attention` and TinyViT's: keys of a size of their own, a bias per offset."""

    @staticmethod
    def sizes(module: Any) -> tuple[int, int]:
        """See the base."""
        return module.num_heads, module.val_dim

    def exclusive_forward(self: Any, x: Tensor) -> Tensor:
        """`B N C` -> `B N C`."""
        if getattr(self, "norm", None) is not None:
            x = self.norm(x)
        sizes = (self.key_dim, self.key_dim, self.val_dim)
        q, k, v = split_sizes(self.qkv(x), self.num_heads, sizes)
        return self.proj(self.attend(q, k, v, bias=self.get_attention_biases(x.device)))
