"""Learned sinks: keys and values that every query may attend, merged into a kernel's output by log-sum-exp.

    B batch   T queries   H query heads   Hkv key/value heads   G = H / Hkv   N sinks   Dk, Dv head sizes

The kernel attends the sequence alone and returns its output and log-sum-exp. With the sinks' logits ``l_n``
the whole normaliser is ``lse' = logaddexp(lse, logsumexp_n l_n)``, and the whole output mixes the kernel's by
``exp(lse - lse')`` with the sinks' values by ``p_n = exp(l_n - lse')``. Given the merged output and
normaliser, the kernel's own backward is exact: its weights are ``exp(s_ij - lse')`` and ``D = rowsum(dy *
y)`` holds for all keys at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xsa_core.attention.projection import accumulation_dtype


def _logits(q: Tensor, sink_k: Tensor, scale: float) -> Tensor:
    """(B, Hkv, G, T, N) in the accumulation type."""
    acc = accumulation_dtype(q.dtype)
    return torch.einsum("bthgd,nhd->bhgtn", _grouped(q, sink_k, acc), sink_k.to(acc)) * scale


def _grouped(x: Tensor, sink: Tensor, acc: torch.dtype) -> Tensor:
    """(B, T, H, D) -> (B, T, Hkv, G, D)."""
    return x.to(acc).unflatten(2, (sink.shape[1], -1))


def _scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def merge_(y: Tensor, lse: Tensor, q: Tensor, sink_k: Tensor, sink_v: Tensor, scale: float | None) -> Tensor:
    """Merge the sinks into ``y`` (B, T, H, Dv) and ``lse`` (B, H, >= T), both overwritten; returns ``y``."""
    T = y.shape[1]
    acc = accumulation_dtype(y.dtype)
    logits = _logits(q, sink_k, _scale(q, scale)).flatten(1, 2)  # (B, H, T, N)
    own = lse[:, :, :T]  # kernels may pad the rows
    whole = torch.logaddexp(own, torch.logsumexp(logits, dim=-1))
    keep = torch.exp(own - whole).transpose(1, 2).unsqueeze(-1)  # (B, T, H, 1)
    weights = torch.exp(logits - whole.unsqueeze(-1)).unflatten(1, (sink_v.shape[1], -1))  # (B, Hkv, G, T, N)
    added = torch.einsum("bhgtn,nhd->bthgd", weights, sink_v.to(acc)).flatten(2, 3)
    y.copy_(y.to(acc) * keep + added)
    own.copy_(whole)
    return y


def merge(y: Tensor, lse: Tensor, q: Tensor, sink_k: Tensor, sink_v: Tensor, scale: float | None) -> Tensor:
    """The same as :func:`merge_` in plain autograd, for outputs whose ``lse`` (B, H, T) is differentiable."""
    acc = accumulation_dtype(y.dtype)
    logits = _logits(q, sink_k, _scale(q, scale)).flatten(1, 2)  # (B, H, T, N)
    whole = torch.logaddexp(lse, torch.logsumexp(logits, dim=-1))
    keep = torch.exp(lse - whole).transpose(1, 2).unsqueeze(-1)  # (B, T, H, 1)
    weights = torch.exp(logits - whole.unsqueeze(-1)).unflatten(1, (sink_v.shape[1], -1))  # (B, Hkv, G, T, N)
    added = torch.einsum("bhgtn,nhd->bthgd", weights, sink_v.to(acc)).flatten(2, 3)
    return (y.to(acc) * keep + added).to(y.dtype)


def backward_(
    dq: Tensor,
    dy: Tensor,
    y: Tensor,
    lse: Tensor,
    q: Tensor,
    sink_k: Tensor,
    sink_v: Tensor,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """Add the sinks' part to ``dq`` in place; returns dsink_k (N, Hkv, Dk) and dsink_v (N, Hkv, Dv).

    ``y`` is any tensor with ``rowsum(dy * y) = D``, ``lse`` the merged normaliser.
    """
    T, acc, scale = q.shape[1], accumulation_dtype(q.dtype), _scale(q, scale)
    logits = _logits(q, sink_k, scale)  # (B, Hkv, G, T, N)
    whole = lse[:, :, :T].unflatten(1, logits.shape[1:3])
    weights = torch.exp(logits - whole.unsqueeze(-1))
    d = _grouped(dy, sink_v, acc)
    inner = (d * _grouped(y, sink_v, acc)).sum(dim=-1).permute(0, 2, 3, 1)  # (B, Hkv, G, T)
    dweights = torch.einsum("bthgd,nhd->bhgtn", d, sink_v.to(acc))
    dlogits = weights * (dweights - inner.unsqueeze(-1)) * scale
    dq.add_(torch.einsum("bhgtn,nhd->bthgd", dlogits, sink_k.to(acc)).flatten(2, 3).to(dq.dtype))
    dsink_k = torch.einsum("bhgtn,bthgd->nhd", dlogits, _grouped(q, sink_k, acc))
    dsink_v = torch.einsum("bhgtn,bthgd->nhd", weights, d)
    return dsink_k.to(sink_k.dtype), dsink_v.to(sink_v.dtype)
