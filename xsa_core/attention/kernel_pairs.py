"""Attention kernels as forward/backward pairs, all with the same interface and layout.

    B batch   T queries   S keys   H query heads   Hkv key/value heads   Dk, Dv head sizes

``forward(q, k, v, bias, causal, scale, dropout_p)`` returns ``(y (B, T, H, Dv), lse (B, H, T), state)``,
where ``state`` is a tuple of two tensors or None that ``backward`` needs again (random state of the dropout).
``backward(dy, q, k, v, y, lse, bias, state, causal, scale, dropout_p, bias_grad)`` returns ``(dq, dk, dv,
dbias or None)``. ``causal`` means T = S, or is a :class:`~xsa_core.attention.documents.Packed` for the flash
kernel of the CPU; every other mask is in ``bias`` (B or 1, H or 1, T, S).

A query row that sees nothing, its bias -inf throughout, gives output 0 and no gradients: every forward
returns ``y = 0`` and a finite ``lse`` there, so that a backward's weights ``exp(-inf - lse)`` vanish. Who
merges by the log-sum-exp first calls :func:`mark_unseen_`, which puts the true -inf there.

A backward uses its forward's output only through ``rowsum(dy * y)``, which is what lets
:mod:`xsa_core.attention.fused` pass another tensor in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from xsa_core.attention.documents import Packed
from xsa_core.attention.precision import bias_as
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


def unseen_rows(bias: Tensor) -> Tensor:
    """The rows (B or 1, H or 1, T or 1) of a bias (..., S) that hide every key; bool."""
    return bias.detach().amax(dim=-1) == -torch.inf


def clear_unseen_(y: Tensor, lse: Tensor, bias: Tensor) -> None:
    """Make rows that see nothing 0 in ``y`` (B, T, H, D) and ``lse`` (B, H, >= T), for kernels that may leave
    anything there."""
    rows = unseen_rows(bias)
    y.masked_fill_(rows.transpose(1, 2).unsqueeze(-1), 0.0)
    lse[:, :, : y.shape[1]].masked_fill_(rows, 0.0)


def mark_unseen_(lse: Tensor, bias: Tensor | None, T: int) -> None:
    """Put the log-sum-exp of nothing, -inf, into the rows of ``lse`` (B, H, >= T) that see nothing."""
    if bias is not None:
        lse[:, :, :T].masked_fill_(unseen_rows(bias), -torch.inf)


def _flash_cpu_forward(q, k, v, bias, causal, scale, dropout_p):
    if isinstance(causal, Packed):
        return _flash_cpu_forward_pieces(q, k, v, causal, scale)
    H = q.shape[2]
    k, v = expand_heads(k, H), expand_heads(v, H)
    y, lse = aten._scaled_dot_product_flash_attention_for_cpu.default(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), 0.0, causal, attn_mask=bias, scale=scale
    )
    return y.transpose(1, 2), lse, (None, None)


def _flash_cpu_backward(dy, q, k, v, y, lse, bias, state, causal, scale, dropout_p, bias_grad):
    if isinstance(causal, Packed):
        return _flash_cpu_backward_pieces(dy, q, k, v, y, lse, causal, scale)
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


def _flash_cpu_forward_pieces(q, k, v, packed, scale):
    """Each document by a call of its own; results laid side by side."""
    y = torch.empty((*q.shape[:3], v.shape[3]), dtype=q.dtype)
    lse = torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=accumulation_dtype(q.dtype))
    for piece in packed.pieces:
        at = piece.rows, piece.tokens
        own, sums, _ = _flash_cpu_forward(q[at], k[at], v[at], None, packed.causal, scale, 0.0)
        y[at] = own
        lse[piece.rows, :, piece.tokens] = sums
    return y, lse, (None, None)


def _flash_cpu_backward_pieces(dy, q, k, v, y, lse, packed, scale):
    grads = [torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v)]
    for piece in packed.pieces:
        at = piece.rows, piece.tokens
        sums = lse[piece.rows, :, piece.tokens].contiguous()
        tensors = (dy[at], q[at], k[at], v[at], y[at], sums)
        own = _flash_cpu_backward(*tensors, None, (None, None), packed.causal, scale, 0.0, False)
        for whole, part in zip(grads, own[:3], strict=True):
            whole[at] = part
    return *grads, None


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


def aligned_bias(bias: Tensor | None, q: Tensor, S: int) -> Tensor | None:
    """The bias (B or 1, H or 1, T, S) as the efficient kernels want it: in the dtype of ``q`` (B, T, H, Dk),
    expanded to (B, H, T, S), rows dense and starting at multiples of 16 elements."""
    if bias is None:
        return None
    bias = bias_as(bias, q.dtype)
    starts = (*bias.stride()[:-1], bias.storage_offset())
    if bias.stride(-1) != 1 or any(start % 16 for start in starts):
        padded = bias.new_zeros((*bias.shape[:-1], S + -S % 16))[..., :S]
        bias = padded.copy_(bias)
    return bias.expand(q.shape[0], q.shape[2], *bias.shape[2:])


def _efficient_forward(q, k, v, bias, causal, scale, dropout_p):
    H, S = q.shape[2], k.shape[1]
    k, v = expand_heads(k, H), expand_heads(v, H)
    y, lse, seed, offset = aten._scaled_dot_product_efficient_attention.default(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        aligned_bias(bias, q, S),
        True,
        dropout_p,
        causal,
        scale=scale,
    )
    y = y.transpose(1, 2)
    if bias is not None:
        clear_unseen_(y, lse, bias)
    return y, lse, (seed, offset)


def _efficient_backward(dy, q, k, v, y, lse, bias, state, causal, scale, dropout_p, bias_grad):
    H, (S, Hkv) = q.shape[2], k.shape[1:3]
    k, v = expand_heads(k, H), expand_heads(v, H)
    dq, dk, dv, dbias = aten._scaled_dot_product_efficient_attention_backward.default(
        dy.transpose(1, 2),
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        aligned_bias(bias, q, S),
        y.transpose(1, 2),
        lse,
        *state,
        dropout_p,
        [True, True, True, bias_grad],
        causal,
        scale=scale,
    )
    dk, dv = (reduce_heads(d.transpose(1, 2), Hkv) for d in (dk, dv))
    if not bias_grad:
        return dq.transpose(1, 2), dk, dv, None
    return dq.transpose(1, 2), dk, dv, dbias[..., :S].sum_to_size(bias.shape).to(bias.dtype)


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
        if bias is not None:
            lse = lse.masked_fill(lse == -torch.inf, 0.0)
        weights = torch.exp(logits - lse.unsqueeze(-1))
        if dropout_p:
            keep = torch.rand_like(weights) >= dropout_p
            weights = weights * keep / (1 - dropout_p)
            kept.append(keep)
        y = weights.view(B, Hkv, H // Hkv * (rows.stop - rows.start), S) @ values  # (B, Hkv, G t, Dv)
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
        dlogits = dlogits.view(B, Hkv, H // Hkv * t, S) * scale
        dqs.append(_unfold(dlogits @ keys, t))
        dk += dlogits.mT @ _fold(q[:, rows], Hkv, acc)
        dv += used.view(B, Hkv, H // Hkv * t, S).mT @ d
    dq = torch.cat(dqs, dim=1).to(q.dtype)
    dbias = dbias.to(bias.dtype) if bias_grad else None
    return dq, dk.transpose(1, 2).to(k.dtype), dv.transpose(1, 2).to(v.dtype), dbias


PAIRS: dict[str, KernelPair] = {
    "flash_cpu": KernelPair(_flash_cpu_forward, _flash_cpu_backward),
    "flash_cuda": KernelPair(_flash_cuda_forward, _flash_cuda_backward),
    "efficient": KernelPair(_efficient_forward, _efficient_backward),
    "math": KernelPair(_math_forward, _math_backward),
}
