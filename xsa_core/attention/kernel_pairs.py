"""Attention kernels as forward/backward pairs, all with the same interface and layout.

    B batch   T queries   S keys   H query heads   Hkv key/value heads   Dk, Dv head sizes

``forward(q, k, v, bias, causal, scale, dropout_p)`` returns ``(y (B, T, H, Dv), lse (B, H, T), state)``,
where ``state`` is a tuple of two tensors or None that ``backward`` needs again (random state of the dropout).
``backward(dy, q, k, v, y, lse, bias, state, causal, scale, dropout_p, bias_grad)`` returns ``(dq, dk, dv,
dbias or None)``. ``causal`` means T = S; every other mask is in ``bias`` (B or 1, H or 1, T, S).

A backward uses its forward's output only through ``rowsum(dy * y)``, which is what lets
:mod:`xsa_core.attention.fused` pass another tensor in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from xsa_core.attention.projection import accumulation_dtype

aten = torch.ops.aten
State = tuple[Tensor | None, Tensor | None]
Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None]

# Logits per tile of the math pair: 2**24 float32 values are 64 MB.
_TILE_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class KernelPair:
    """A forward and the backward that belongs to it."""

    forward: Callable[..., tuple[Tensor, Tensor, State]]
    backward: Callable[..., Gradients]


def expand_heads(x: Tensor, heads: int) -> Tensor:
    """(B, S, Hkv, D) -> (B, S, H, D), a transient copy for kernels that know no groups."""
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], dim=2)


def reduce_heads(dx: Tensor, heads: int) -> Tensor:
    """(B, S, H, D) -> (B, S, Hkv, D): the adjoint of :func:`expand_heads`."""
    return dx if dx.shape[2] == heads else dx.unflatten(2, (heads, -1)).sum(dim=3)


def _flash_cpu_forward(q, k, v, bias, causal, scale, dropout_p):
    H = q.shape[2]
    k, v = expand_heads(k, H), expand_heads(v, H)
    y, lse = aten._scaled_dot_product_flash_attention_for_cpu.default(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), 0.0, causal, attn_mask=bias, scale=scale
    )
    return y.transpose(1, 2), lse, (None, None)


def _flash_cpu_backward(dy, q, k, v, y, lse, bias, state, causal, scale, dropout_p, bias_grad):
    H, Hkv = q.shape[2], k.shape[2]
    k, v = expand_heads(k, H), expand_heads(v, H)
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
        dy.transpose(1, 2),
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        y.transpose(1, 2),
        lse,
        0.0,
        causal,
        attn_mask=bias,
        scale=scale,
    )
    dk, dv = (reduce_heads(d.transpose(1, 2), Hkv) for d in (dk, dv))
    return dq.transpose(1, 2), dk, dv, None


def _flash_cuda_forward(q, k, v, bias, causal, scale, dropout_p):
    y, lse, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_flash_attention.default(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), dropout_p, causal, False, scale=scale
    )
    return y.transpose(1, 2), lse, (seed, offset)


def _flash_cuda_backward(dy, q, k, v, y, lse, bias, state, causal, scale, dropout_p, bias_grad):
    dq, dk, dv = aten._scaled_dot_product_flash_attention_backward.default(
        dy.transpose(1, 2),
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        y.transpose(1, 2),
        lse,
        None,
        None,
        q.shape[1],
        k.shape[1],
        dropout_p,
        causal,
        *state,
        scale=scale,
    )
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2), None


def aligned_bias(bias: Tensor | None, B: int, H: int, T: int, S: int) -> Tensor | None:
    """The bias as the efficient kernel wants it: expanded, rows starting at multiples of 16 elements."""
    if bias is None:
        return None
    if S % 16:
        bias = torch.nn.functional.pad(bias, (0, 16 - S % 16))[..., :S]
    return bias.expand(B, H, T, S)


def _efficient_forward(q, k, v, bias, causal, scale, dropout_p):
    (B, T, H, _), S = q.shape, k.shape[1]
    k, v = expand_heads(k, H), expand_heads(v, H)
    y, lse, seed, offset = aten._scaled_dot_product_efficient_attention.default(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        aligned_bias(bias, B, H, T, S),
        True,
        dropout_p,
        causal,
        scale=scale,
    )
    return y.transpose(1, 2), lse, (seed, offset)


def _efficient_backward(dy, q, k, v, y, lse, bias, state, causal, scale, dropout_p, bias_grad):
    (B, T, H, _), (S, Hkv) = q.shape, k.shape[1:3]
    k, v = expand_heads(k, H), expand_heads(v, H)
    dq, dk, dv, dbias = aten._scaled_dot_product_efficient_attention_backward.default(
        dy.transpose(1, 2),
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        aligned_bias(bias, B, H, T, S),
        y.transpose(1, 2),
        lse,
        *state,
        dropout_p,
        [True, True, True, bias_grad],
        causal,
        scale=scale,
    )
    dk, dv = (reduce_heads(d.transpose(1, 2), Hkv) for d in (dk, dv))
    return dq.transpose(1, 2), dk, dv, dbias[..., :S].sum_to_size(bias.shape) if bias_grad else None


def _fold(x: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """(B, T, H, D) -> (B, Hkv, G T, D): the heads of a group become rows, so keys need no copy per head."""
    return x.to(dtype).unflatten(2, (heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)


def _unfold(x: Tensor, T: int) -> Tensor:
    """(B, Hkv, G T, D) -> (B, T, H, D)."""
    return x.unflatten(2, (-1, T)).flatten(1, 2).transpose(1, 2)


def _tiles(B: int, H: int, T: int, S: int) -> list[slice]:
    """Query rows per tile, so that its logits stay small; a traced graph gets one, good for every length."""
    if torch.compiler.is_compiling():
        return [slice(0, T)]
    step = max(1, min(T, _TILE_ELEMENTS // max(1, B * H * S)))
    return [slice(i, min(i + step, T)) for i in range(0, T, step)]


def _math_logits(q, keys, bias, causal, scale, rows):
    """Logits (B, H, t, S) of the query rows of one tile; keys (B, Hkv, S, Dk)."""
    H, t = q.shape[2], rows.stop - rows.start
    logits = _fold(q[:, rows], keys.shape[1], keys.dtype) @ keys.mT * scale  # (B, Hkv, G t, S)
    logits = logits.view(q.shape[0], H, t, keys.shape[2])
    if causal:
        hidden = torch.ones(t, keys.shape[2], dtype=torch.bool, device=q.device).triu(1 + rows.start)
        logits = logits.masked_fill(hidden, -torch.inf)
    if bias is not None:
        logits = logits + (bias[..., rows, :] if bias.shape[2] != 1 else bias)
    return logits


def _math_forward(q, k, v, bias, causal, scale, dropout_p):
    (B, T, H, Dk), (S, Hkv) = q.shape, k.shape[1:3]
    acc = accumulation_dtype(q.dtype)
    scale = Dk**-0.5 if scale is None else scale
    keys, values = k.to(acc).transpose(1, 2), v.to(acc).transpose(1, 2)  # (B, Hkv, S, D)
    outputs, sums, kept = [], [], []
    for rows in _tiles(B, H, T, S):
        logits = _math_logits(q, keys, bias, causal, scale, rows)
        lse = torch.logsumexp(logits, dim=-1)  # (B, H, t)
        weights = torch.exp(logits - lse.unsqueeze(-1))
        if dropout_p:
            keep = torch.rand_like(weights) >= dropout_p
            weights = weights * keep / (1 - dropout_p)
            kept.append(keep)
        y = weights.view(B, Hkv, -1, S) @ values  # (B, Hkv, G t, Dv)
        outputs.append(_unfold(y, rows.stop - rows.start))
        sums.append(lse)
    y = torch.cat(outputs, dim=1).to(q.dtype).contiguous()
    return y, torch.cat(sums, dim=2), (torch.cat(kept, dim=2) if kept else None, None)


def _math_backward(dy, q, k, v, y, lse, bias, state, causal, scale, dropout_p, bias_grad, dlse=None):
    """Also takes ``dlse`` (B, H, T), the gradient of the log-sum-exp."""
    (B, T, H, Dk), (S, Hkv) = q.shape, k.shape[1:3]
    acc = accumulation_dtype(q.dtype)
    scale = Dk**-0.5 if scale is None else scale
    keys, values = k.to(acc).transpose(1, 2), v.to(acc).transpose(1, 2)
    inner = (dy.to(acc) * y.to(acc)).sum(dim=-1).transpose(1, 2)  # (B, H, T)
    inner = inner if dlse is None else inner - dlse
    dqs, dk, dv = [], torch.zeros_like(keys), torch.zeros_like(values)
    dbias = torch.zeros(bias.shape, dtype=acc, device=q.device) if bias_grad else None
    for rows in _tiles(B, H, T, S):
        t = rows.stop - rows.start
        logits = _math_logits(q, keys, bias, causal, scale, rows)
        weights = torch.exp(logits - lse[:, :, rows].unsqueeze(-1))  # (B, H, t, S)
        d = _fold(dy[:, rows], Hkv, acc)  # (B, Hkv, G t, Dv)
        dweights = (d @ values.mT).view(B, H, t, S)
        used = weights
        if dropout_p:
            keep = state[0][:, :, rows].to(acc) / (1 - dropout_p)
            used, dweights = weights * keep, dweights * keep
        dlogits = weights * (dweights - inner[:, :, rows].unsqueeze(-1))
        if bias_grad:
            part = dbias if bias.shape[2] == 1 else dbias[..., rows, :]
            part += dlogits.sum_to_size(part.shape)
        dlogits = dlogits.view(B, Hkv, -1, S) * scale
        dqs.append(_unfold(dlogits @ keys, t))
        dk += dlogits.mT @ _fold(q[:, rows], Hkv, acc)
        dv += used.view(B, Hkv, -1, S).mT @ d
    dq = torch.cat(dqs, dim=1).to(q.dtype)
    dbias = dbias.to(bias.dtype) if bias_grad else None
    return dq, dk.transpose(1, 2).to(k.dtype), dv.transpose(1, 2).to(v.dtype), dbias


PAIRS: dict[str, KernelPair] = {
    "flash_cpu": KernelPair(_flash_cpu_forward, _flash_cpu_backward),
    "flash_cuda": KernelPair(_flash_cuda_forward, _flash_cuda_backward),
    "efficient": KernelPair(_efficient_forward, _efficient_backward),
    "math": KernelPair(_math_forward, _math_backward),
}
