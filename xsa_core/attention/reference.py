"""The specification: attention and exclusion written out, differentiable by autograd to any order.

Slow and memory-hungry on purpose; every fast path is tested against it and none is built on it.

    B batch   T queries   S keys   H query heads   Hkv key/value heads   Dk, Dv head sizes
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from xsa_core.attention.masks import Mask
from xsa_core.attention.precision import bias_as
from xsa_core.attention.projection import Strength, accumulation_dtype, expand_strength, unit_and_inverse_norm


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    sinks: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax attention with everything explicit.

    Args:
        q: (B, T, H, Dk). k: (B, S, Hkv, Dk). v: (B, S, Hkv, Dv).
        mask: who sees whom; None is everything.
        bias: added to the scaled logits, broadcasts to (B, H, T, S).
        scale: of the logits, 1/sqrt(Dk) by default.
        dropout_p: probability of dropping an attention weight.
        sinks: (sink_k (N, Hkv, Dk), sink_v (N, Hkv, Dv)), visible to every query, neither masked nor biased.

    Returns:
        y (B, T, H, Dv) in q's dtype; weights (B, H, T, S), or (B, H, T, N + S) with the sinks first, and lse
        (B, H, T), both in the accumulation type. A query that sees nothing has y 0 and lse -inf.
    """
    acc = accumulation_dtype(q.dtype)
    B, T, H, Dk = q.shape
    S, Hkv = k.shape[1], k.shape[2]
    group = H // Hkv
    qa, ka, va = q.to(acc), k.to(acc), v.to(acc)
    ka, va = (x.repeat_interleave(group, dim=2) for x in (ka, va))  # (B, S, H, D)
    scale = 1 / math.sqrt(Dk) if scale is None else scale
    logits = torch.einsum("bthd,bshd->bhts", qa, ka) * scale
    if bias is not None:
        logits = logits + bias_as(bias, acc)
    if mask is not None:
        logits = logits.masked_fill(~mask.to_dense(B, T, S, q.device), -torch.inf)
    if sinks is not None:
        sink_k, sink_v = (x.to(acc).repeat_interleave(group, dim=1) for x in sinks)  # (N, H, D)
        logits = torch.cat([torch.einsum("bthd,nhd->bhtn", qa, sink_k) * scale, logits], dim=-1)
        va = torch.cat([sink_v.expand(B, *sink_v.shape), va], dim=1)  # (B, N + S, H, Dv)
    # A row that sees nothing has weights 0; it is computed on zeros, for the sake of its gradients.
    nothing = (logits == -torch.inf).all(dim=-1, keepdim=True)
    logits = logits.masked_fill(nothing, 0.0)
    lse = torch.logsumexp(logits, dim=-1).masked_fill(nothing.squeeze(-1), -torch.inf)
    weights = torch.softmax(logits, dim=-1).masked_fill(nothing, 0.0)
    dropped = torch.dropout(weights, dropout_p, train=True) if dropout_p else weights
    y = torch.einsum("bhts,bshd->bthd", dropped, va)
    return y.to(q.dtype), weights, lse


def reference_exclude(y: Tensor, v: Tensor, strength: Strength = 1.0) -> Tensor:
    """``z = y - s (y . vh) vh``; y (B, T, H, D), v (B, T, Hkv, D), differentiable to any order."""
    B, T, H, _ = y.shape
    vh, _ = unit_and_inverse_norm(v)
    vh = vh.repeat_interleave(H // v.shape[2], dim=2)  # (B, T, H, D)
    ya = y.to(vh.dtype)
    c = (ya * vh).sum(dim=-1, keepdim=True)
    if isinstance(strength, Tensor):
        strength = expand_strength(strength, B, T, H).to(vh.dtype).unsqueeze(-1)
    return (ya - strength * c * vh).to(y.dtype)
