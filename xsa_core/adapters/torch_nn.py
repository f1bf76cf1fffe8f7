"""`torch.nn.MultiheadAttention` and everything built on it.

N batch   L queries   S keys   E embedding      (the letters of torch's own documentation)
B T H D   as everywhere else here
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xsa_core.adapters.base import LEFT_ALONE
from xsa_core.adapters.exclusion import Exclusion
from xsa_core.adapters.layer import ConvertedLayer, TableAdapter, hidden
from xsa_core.attention.masks import resolve_mask
from xsa_core.attention.reference import reference_attention
from xsa_core.attention.variants import Call


class MultiheadAttentionLayer(ConvertedLayer):
    """`nn.MultiheadAttention`.

    One module serves as self or cross attention, call by call: it is exclusive where key and query are the
    same tensor, or the same memory seen twice (the value may be another one, as where positions are added to
    queries and keys only), and plain otherwise. Weights that are returned are those of the attention, before
    exclusion and dropout.
    """

    # The attributes of nn.MultiheadAttention that are used here.
    num_heads: int
    head_dim: int
    batch_first: bool
    dropout: float
    add_zero_attn: bool
    in_proj_weight: Tensor | None
    in_proj_bias: Tensor | None
    bias_k: Tensor | None
    bias_v: Tensor | None

    @staticmethod
    def sizes(module: Any) -> tuple[int, int]:
        """See the base."""
        return module.num_heads, module.head_dim

    def exclusive_forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As `nn.MultiheadAttention.forward`."""
        masks = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
        if not _same(query, key):
            _warn_of_another_key(query, key)
            return nn.MultiheadAttention.forward(self, query, key, value, *masks)  # type: ignore[arg-type]
        if query.is_nested:
            return self._nested_forward(query, value, masks)
        if is_causal and attn_mask is None:
            raise ValueError("is_causal is a hint about attn_mask, which is missing; pass both, or neither")
        batched = query.dim() == 3
        x = self._batch_first(query)  # B T E
        q, k, own_v = self._project(*(x if y is query else self._batch_first(y) for y in (query, key, value)))
        causal = is_causal and key_padding_mask is None
        bias = None if causal else self._bias(q, attn_mask, key_padding_mask)
        k, v, bias = self._with_extra_keys(k, own_v, bias)
        dropout_p = self.dropout if self.training else 0.0  # type: ignore[attr-defined]
        call = self.exclusion.call(causal=causal, bias=bias, dropout_p=dropout_p)
        heads = self.exclusion(q, k, v, own_v, call)
        out = self.out_proj(heads.flatten(2))  # type: ignore[attr-defined]  # B T H D -> B T E
        weights = self._weights(q, k, v, call, average_attn_weights) if need_weights else None
        if not batched:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return out if self.batch_first else out.transpose(0, 1), weights

    def _batch_first(self, x: Tensor) -> Tensor:
        """`L E`, `L N E` or `N L E` -> `N L E`."""
        if x.dim() == 2:
            return x.unsqueeze(0)
        return x if self.batch_first else x.transpose(0, 1)

    def _project(self, x: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of x, keys of `key`, values of `value`, each `B T H D`.

        A key that is a detached view of x keeps its own path of gradients.
        """
        heads = (self.num_heads, self.head_dim)
        if self.in_proj_weight is not None and key is x and value is x:
            packed = F.linear(x, self.in_proj_weight, self.in_proj_bias)  # B T 3E
            q, k, v = packed.unflatten(-1, (3, *heads)).unbind(2)
            return q, k, v
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)  # type: ignore[attr-defined]
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        q, k, v = (
            F.linear(y, w, b).unflatten(-1, heads)
            for y, w, b in zip((x, key, value), weights, biases, strict=True)
        )
        return q, k, v

    def _bias(self, q: Tensor, attn_mask: Tensor | None, padding: Tensor | None) -> Tensor | None:
        """Both masks as one bias, broadcasting to `B H T S`; in torch's bool masks True is hidden."""
        B, T, H, _ = q.shape
        bias = None
        if attn_mask is not None:
            if attn_mask.shape not in ((T, T), (B * H, T, T)):
                raise ValueError(
                    f"attn_mask of shape {tuple(attn_mask.shape)} does not fit: expected (L, S) = {(T, T)} "
                    f"or (N * heads, L, S) = {(B * H, T, T)}"
                )
            bias = hidden(attn_mask, q.dtype)
            bias = bias.unflatten(0, (B, H)) if bias.dim() == 3 else bias
        if padding is not None:
            padding = padding.unsqueeze(0) if padding.dim() == 1 else padding
            if padding.shape != (B, T):
                raise ValueError(
                    f"key_padding_mask of shape {tuple(padding.shape)} does not fit: expected (N, S) = "
                    f"{(B, T)}"
                )
            added = hidden(padding, q.dtype)[:, None, None, :]
            bias = added if bias is None else bias + added
        return bias

    def _with_extra_keys(
        self, k: Tensor, v: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """`bias_k`, `bias_v` and the zero of `add_zero_attn`, before the tokens so that those stay last."""
        B, _, H, D = k.shape
        extra_k, extra_v = [], []
        if self.bias_k is not None and self.bias_v is not None:
            for extra, row in ((extra_k, self.bias_k), (extra_v, self.bias_v)):
                extra.append(row.to(k.dtype).view(1, 1, H, D).expand(B, 1, H, D))
        if self.add_zero_attn:
            extra_k.append(k.new_zeros(B, 1, H, D))
            extra_v.append(v.new_zeros(B, 1, H, D))
        if not extra_k:
            return k, v, bias
        if bias is not None:
            bias = F.pad(bias, (len(extra_k), 0))
        return torch.cat([*extra_k, k], dim=1), torch.cat([*extra_v, v], dim=1), bias

    def _weights(self, q: Tensor, k: Tensor, v: Tensor, call: Call, average: bool) -> Tensor:
        """`B T S`, or `B H T S`: extra keys last, as torch has them."""
        call = self.exclusion.variant.prepare(call)
        mask = resolve_mask(call.causal, call.mask)
        _, weights, _ = reference_attention(q, k, v, mask=mask, bias=call.bias, scale=call.scale)
        extra = k.shape[1] - q.shape[1]
        if extra:
            weights = torch.cat([weights[..., extra:], weights[..., :extra]], dim=-1)
        weights = weights.to(q.dtype)
        return weights.mean(dim=1) if average else weights

    def _nested_forward(self, query: Tensor, value: Tensor, masks: tuple) -> tuple[Tensor, None]:
        """A batch of sequences of different lengths, which `nn.TransformerEncoder` makes of a padded one."""
        key_padding_mask, need_weights, attn_mask, _, _ = masks
        if value is not query or need_weights or key_padding_mask is not None or attn_mask is not None:
            raise ValueError(
                "a nested tensor goes through attention with need_weights=False, without masks, and as "
                "query, key and value at once; pad it for anything else"
            )
        lengths = [row.shape[0] for row in query.unbind()]
        padded = torch.nested.to_padded_tensor(query, 0.0)  # B T E
        steps = torch.arange(padded.shape[1], device=padded.device)
        hidden = steps >= torch.tensor(lengths, device=padded.device)[:, None]  # B T
        if not self.batch_first:
            padded = padded.transpose(0, 1)
        out, _ = self.exclusive_forward(padded, padded, padded, hidden, need_weights=False)
        out = out if self.batch_first else out.transpose(0, 1)
        rows = [row[:n] for row, n in zip(out, lengths, strict=True)]
        return torch.nested.as_nested_tensor(rows, layout=query.layout), None


class TorchAdapter(TableAdapter):
    """See the module docstring."""

    def prepare(self, exclusion: Exclusion) -> None:
        """Keep `nn.TransformerEncoderLayer` off its fused kernel.

        In evaluation that would compute plain attention from the weights without calling the layer. It
        stands back where any module inside has a hook.
        """
        exclusion.register_forward_pre_hook(_nothing)

    def role(self, model: nn.Module, path: str, module: nn.Module) -> tuple[str, str] | None:
        """Cross attention of the decoder layer is a `MultiheadAttention` like the others."""
        parent, _, name = path.rpartition(".")
        decoder = path and isinstance(model.get_submodule(parent), nn.TransformerDecoderLayer)
        return ("cross", LEFT_ALONE["cross"]) if decoder and name == "multihead_attn" else None


def _nothing(module: nn.Module, args: Any) -> None:
    """A hook that is there to be seen."""


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two arguments are one tensor, or the same places of the same memory.

    The latter come of reentrant checkpointing, which detaches each argument by itself to compute anew.
    """
    if a is b:
        return True
    if torch.compiler.is_compiling() or a.is_nested or b.is_nested or a.dtype != b.dtype:
        return False
    if a.shape != b.shape or a.stride() != b.stride() or a.storage_offset() != b.storage_offset():
        return False
    try:
        return a.untyped_storage()._cdata == b.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # tensors of torch.func have no memory of their own
        return False


def _warn_of_another_key(query: Tensor, key: Tensor) -> None:
    """The one case in which a call that is meant as self attention is not seen as such."""
    if not torch.compiler.is_compiling() and not query.is_nested and query.shape == key.shape:
        warnings.warn(
            "a converted MultiheadAttention got a key that is another tensor than the query, of the same "
            "shape: this is computed as plain cross attention. If it is self attention, pass one tensor as "
            "query and key; if it is not, leave the layer out: convert(model, layers=lambda path: ...)",
            stacklevel=4,
        )


ADAPTER = TorchAdapter(
    "torch.nn",
    layers={
        "torch.nn.modules.activation.MultiheadAttention": (
            MultiheadAttentionLayer,
            "TransformerEncoder, TransformerDecoder, Transformer",
        ),
    },
    others={},
)
