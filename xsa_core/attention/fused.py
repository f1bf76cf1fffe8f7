"""Attention and exclusion as one differentiable operator over a kernel's forward/backward pair.

Let ``vh = v/|v|``, ``c = y.vh``, ``z = y - c vh`` and ``g = dL/dz``. Then ``dy = g - (g.vh) vh`` is
orthogonal to ``v``, so ``dy.y = dy.z``; an attention backward uses its output only through ``D = rowsum(dy *
y)``, so ``z`` serves in the place of ``y``. Hence ``z`` overwrites ``y``, and beyond plain attention only the
scalar ``c`` per token and head is saved. Where the identity does not hold (strength other than 1) or loses
digits (half types: the rounding of ``dy`` leaves a little of it along ``v``, which ``y`` would cancel and
``z`` does not), ``y = z + s c vh`` is rebuilt for the backward and never stored.

Half types against the same two lines in plain torch: the error of all gradients together is smaller at any
mean cosine of y and v (by 16% at 0.3, 15% at 0.9, 1% at 0.997), that of dv alone about half. dq or dk alone
may be up to 3% worse at cosines around 0.9, because y is rounded twice, once as z. No transient repairs that:
the exact ``rowsum(dy * y)``, all that a backward takes from y, was tried and is no better.

    B batch   T queries   S keys   H query heads   Hkv key/value heads   N sinks   Dk, Dv head sizes
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from xsa_core.attention import kernel_pairs, projection_ops, sinks, xformers_pair
from xsa_core.attention.precision import without_autocast
from xsa_core.attention.projection import accumulation_dtype, expand_strength

_HALF = (torch.bfloat16, torch.float16)

PAIRS = {**kernel_pairs.PAIRS, "xformers": xformers_pair.PAIR}


_ATTENTION = "fused exclusive attention has no {}; use backend='reference', which is plain autograd"
_EXCLUDE = "exclude has no {}; use xsa_core.attention.reference_exclude, which is plain autograd"


class _NoDoubleBackward(torch.autograd.Function):
    """Identity on the first gradients, where a graph of them is asked for; its backward says what to use."""

    @staticmethod
    def forward(ctx, advice, *tensors):
        ctx.advice = advice
        return tuple(t.view_as(t) if t is not None else None for t in tensors)

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError(ctx.advice.format("second derivative"))


def _refuse_transforms(advice: str, *tensors: object) -> None:
    """Say in one line what torch would say in three, before it does. A traced graph has neither, and its
    compiler takes no `jvp` that says it.

    Raises:
        RuntimeError: inside a ``torch.func`` transform, or for tensors with a forward-mode tangent.
    """
    if torch.compiler.is_compiling():
        return
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(advice.format("torch.func transforms (grad, vmap, jvp)"))
    if forward_ad._current_level >= 0:
        duals = [
            t for t in tensors if isinstance(t, Tensor) and forward_ad.unpack_dual(t).tangent is not None
        ]
        if duals:
            raise RuntimeError(advice.format("forward-mode derivative"))


class _ExclusiveAttention(torch.autograd.Function):
    """See the module docstring; arguments as in :func:`fused_attention`, everything checked and normalised
    there."""

    @staticmethod
    def forward(
        ctx,
        q,
        k,
        v,
        own_v,
        strength,
        bias,
        sink_k,
        sink_v,
        kernel,
        causal,
        scale,
        dropout_p,
        exclusive,
        factor,
    ):
        y, lse, state = PAIRS[kernel].forward(q, k, v, bias, causal, scale, dropout_p)
        if sink_k is not None:
            kernel_pairs.mark_unseen_(lse, bias, q.shape[1])
            y = sinks.merge_(y, lse, q, sink_k, sink_v, scale)
        c = None
        if exclusive:
            own = v if own_v is None else own_v
            c = projection_ops.exclude_into(y, own, factor, _full_strength(strength, y))
        ctx.save_for_backward(q, k, v, own_v, strength, bias, sink_k, sink_v, y, lse, c, *state)
        ctx.options = (kernel, causal, scale, dropout_p, exclusive, factor)
        return y

    @staticmethod
    def backward(ctx, g):
        with without_autocast(g.device):
            return _ExclusiveAttention._gradients(ctx, g)

    @staticmethod
    def _gradients(ctx, g):
        q, k, v, own_v, strength, bias, sink_k, sink_v, z, lse, c, *state = ctx.saved_tensors
        kernel, causal, scale, dropout_p, exclusive, factor = ctx.options
        own = v if own_v is None else own_v
        g = _dense_rows(g)  # a sum's gradient is one number seen everywhere
        dy, y, down, ds = g, z, None, None
        if exclusive:
            rebuild = strength is not None or factor != 1.0 or z.dtype in _HALF
            dy, down, ds, y = projection_ops.exclude_backward(
                g, z, own, c, factor, _full_strength(strength, z), restore=rebuild
            )
            y = y if rebuild else z
        dq, dk, dv, dbias = PAIRS[kernel].backward(
            dy, q, k, v, y, lse, bias, state, causal, scale, dropout_p, ctx.needs_input_grad[5]
        )
        dsink_k = dsink_v = None
        if sink_k is not None:
            dsink_k, dsink_v = sinks.backward_(dq, dy, y, lse, q, sink_k, sink_v, scale)
        if exclusive and own_v is None:
            dv = dv.add_(down)
            down = None
        if ds is not None:
            ds = ds.sum_to_size(strength.shape).to(strength.dtype)
        grads = (dq, dk, dv, down, ds, dbias, dsink_k, dsink_v)
        return *_first_only(grads, _ATTENTION), None, None, None, None, None, None


def _first_only(grads: tuple[Tensor | None, ...], advice: str) -> tuple[Tensor | None, ...]:
    """The gradients, made to refuse a second derivative where a graph of them is being recorded."""
    return _NoDoubleBackward.apply(advice, *grads) if torch.is_grad_enabled() else grads


def _full_strength(strength: Tensor | None, y: Tensor) -> Tensor | None:
    """Strength tensor as a (B, T, H) view in the accumulation type, or None."""
    if strength is None:
        return None
    return expand_strength(strength.to(accumulation_dtype(y.dtype)), *y.shape[:3])


def fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    kernel: str,
    causal: bool,
    bias: Tensor | None = None,
    own_v: Tensor | None = None,
    strength: float | Tensor | None = 1.0,
    scale: float | None = None,
    dropout_p: float = 0.0,
    sink_kv: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Attention, then exclusion, as one operator.

    Args:
        q: (B, T, H, Dk). k: (B, S, Hkv, Dk). v: (B, S, Hkv, Dv).
        kernel: a name of :data:`PAIRS`.
        causal: the plain causal mask with T = S; every other mask comes in ``bias``. For xformers its plan
            instead.
        bias: (B or 1, H or 1, T or 1, S), added to the scaled logits.
        own_v: (B, T, Hkv, Dv), the tokens' own values where they are not ``v`` itself.
        strength: None or 0 for plain attention by the same kernel.
        scale: of the logits, 1/sqrt(Dk) by default.
        dropout_p: of the attention weights.
        sink_kv: learned keys (N, Hkv, Dk) and values (N, Hkv, Dv).

    Returns:
        (B, T, H, Dv), contiguous.
    """
    _refuse_transforms(_ATTENTION, q, k, v, bias, own_v, strength, *(sink_kv or ()))
    is_tensor = isinstance(strength, Tensor)
    exclusive = is_tensor or bool(strength)
    sink_k, sink_v = (None, None) if sink_kv is None else sink_kv
    return _ExclusiveAttention.apply(
        _dense_rows(q),
        _dense_rows(k),
        _dense_rows(v),
        None if own_v is None or not exclusive else _dense_rows(own_v),
        strength if is_tensor else None,
        bias,
        sink_k,
        sink_v,
        kernel,
        causal,
        scale,
        dropout_p,
        exclusive,
        1.0 if is_tensor or not exclusive else float(strength),
    )


def _dense_rows(x: Tensor) -> Tensor:
    """The kernels want the last axis dense, those of CUDA also rows that start at multiples of 8 elements;
    views of a fused projection are both."""
    dense = x.stride(-1) == 1
    if dense and x.is_cuda and x.shape[-1] % 8 == 0:
        dense = all(start % 8 == 0 for start in (*x.stride()[:-1], x.storage_offset()))
    return x if dense else x.contiguous()


class _AttentionWithLse(torch.autograd.Function):
    """Plain attention returning its log-sum-exp as a second differentiable output."""

    @staticmethod
    def forward(ctx, q, k, v, bias, kernel, causal, scale):
        y, lse, state = PAIRS[kernel].forward(q, k, v, bias, causal, scale, 0.0)
        ctx.save_for_backward(q, k, v, bias, y, lse, *state)
        ctx.options = (kernel, causal, q.shape[-1] ** -0.5 if scale is None else scale)
        own = lse[:, :, : q.shape[1]].clone()
        kernel_pairs.mark_unseen_(own, bias, q.shape[1])
        return y, own

    @staticmethod
    def backward(ctx, g, dlse):
        with without_autocast(g.device):
            return _AttentionWithLse._gradients(ctx, g, dlse)

    @staticmethod
    def _gradients(ctx, g, dlse):
        q, k, v, bias, y, lse, *state = ctx.saved_tensors
        kernel, causal, scale = ctx.options
        pair = PAIRS[kernel]
        options = (causal, scale, 0.0)
        g, bias_grad = _dense_rows(g), ctx.needs_input_grad[3]
        if kernel == "math":
            grads = pair.backward(g, q, k, v, y, lse, bias, state, *options, bias_grad, dlse)
            return *_first_only(grads, _ATTENTION), None, None, None
        dq, dk, dv, dbias = pair.backward(g, q, k, v, y, lse, bias, state, *options, bias_grad)
        # d lse_i / d q_i = scale sum_j P_ij k_j is attention with the keys as values; the adjoint of that
        # attention gives the keys' part.
        mean_key, again, state = pair.forward(q, k, k, bias, *options)
        weight = (dlse.transpose(1, 2).unsqueeze(-1) * scale).to(q.dtype)  # (B, T, H, 1)
        _, _, along, _ = pair.backward(weight * q, q, k, k, mean_key, again, bias, state, *options, False)
        grads = (dq + weight * mean_key, dk + along, dv, dbias)
        return *_first_only(grads, _ATTENTION), None, None, None


def attention_with_lse(
    q: Tensor, k: Tensor, v: Tensor, *, kernel: str, causal: bool, bias: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Attention (B, T, H, Dv) and its log-sum-exp (B, H, T), both differentiable.

    Arguments as in :func:`fused_attention`.
    """
    _refuse_transforms(_ATTENTION, q, k, v, bias)
    return _AttentionWithLse.apply(
        _dense_rows(q), _dense_rows(k), _dense_rows(v), bias, kernel, causal, scale
    )


class _Exclude(torch.autograd.Function):
    """Exclusion alone, for an attention output computed elsewhere; saves z, v and the scalar c."""

    @staticmethod
    def forward(ctx, y, v, strength, factor):
        z, c = projection_ops.exclude_out_of_place(y, v, factor, _full_strength(strength, y))
        ctx.save_for_backward(z, v, c, strength)
        ctx.factor = factor
        return z

    @staticmethod
    def backward(ctx, g):
        z, v, c, strength = ctx.saved_tensors
        dy, dv, ds, _ = projection_ops.exclude_backward(
            _dense_rows(g), z, v, c, ctx.factor, _full_strength(strength, z), restore=False
        )
        if ds is not None:
            ds = ds.sum_to_size(strength.shape).to(strength.dtype)
        return *_first_only((dy, dv, ds), _EXCLUDE), None


def exclude(y: Tensor, v: Tensor, strength: float | Tensor = 1.0) -> Tensor:
    """Exclusion of ``v`` (B, T, Hkv, D) from ``y`` (B, T, H, D) as one differentiable pass."""
    _refuse_transforms(_EXCLUDE, y, v, strength)
    is_tensor = isinstance(strength, Tensor)
    return _Exclude.apply(
        _dense_rows(y), _dense_rows(v), strength if is_tensor else None, 1.0 if is_tensor else float(strength)
    )
