"""xformers' memory-efficient attention as a kernel pair: forward with log-sum-exp, backward as a call of its
own.

    B batch   T queries   S keys   H query heads   Hkv key/value heads   Dk, Dv head sizes

Its grouped layout has no backward, so keys and values are expanded to all heads as transients and their
gradients reduced. Masks go in as its attention-bias classes where one says the same, else as a tensor.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from xsa_core.attention.documents import document_lengths
from xsa_core.attention.kernel_pairs import (
    KernelPair,
    aligned_bias,
    clear_unseen_,
    expand_heads,
    reduce_heads,
)
from xsa_core.attention.masks import Mask

_PLANS: weakref.WeakKeyDictionary[Mask, dict[tuple[int, ...], Plan | None]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class Plan:
    """How a mask goes in. ``bias`` is an xformers attention bias or None (everything visible).

    ``packed``: the batch is laid end to end in one row, as its block-diagonal biases want it.
    """

    bias: Any = None
    packed: bool = False


def plan_mask(mask: Mask, B: int, T: int, S: int) -> Plan | None:
    """The plan of a mask, or None where only a dense tensor says the same.

    Reading document ids waits for the device, so a mask's plan is kept for its later uses in other layers.
    """
    plans = _PLANS.setdefault(mask, {})
    if (B, T, S) not in plans:
        plans[B, T, S] = _plan(mask, B, T, S)
    return plans[B, T, S]


def _plan(mask: Mask, B: int, T: int, S: int) -> Plan | None:
    from xformers.ops.fmha import attn_bias as biases

    features, size = mask.features, mask.window_size
    if features == set():
        return Plan()
    if features == {"causal"}:
        return Plan(biases.LowerTriangularMask() if T == S else biases.LowerTriangularFromBottomRightMask())
    if features == {"causal", "window"}:
        return Plan(biases.LowerTriangularFromBottomRightLocalAttentionMask(_window_size=size))
    if features == {"window"}:
        return Plan(biases.LocalAttentionFromBottomRightMask(window_left=size - 1, window_right=size - 1))
    if T == S and "documents" in features and features <= {"documents", "causal", "window"}:
        if len(mask.document_ids) > 1 or features == {"documents", "window"}:
            return None
        lengths = document_lengths(mask.document_ids[0].expand(B, S))
        if lengths is None:
            return None
        blocks = biases.BlockDiagonalMask.from_seqlens(lengths)
        if "window" in features:
            return Plan(blocks.make_local_attention(size), packed=True)
        return Plan(blocks.make_causal() if "causal" in features else blocks, packed=True)
    return None


def _packed(x: Tensor, plan: Plan | None) -> Tensor:
    """(B, T, H, D) -> (1, B T, H, D) where the plan wants it."""
    return x.reshape(1, -1, *x.shape[2:]) if plan is not None and plan.packed else x


def _bias(q: Tensor, k: Tensor, dense: Tensor | None, plan: Plan | None) -> Any:
    """The attn_bias argument: the dense one where there is one, in q's dtype."""
    if dense is None:
        return plan.bias if plan is not None else None
    return aligned_bias(dense, q, k.shape[1])


def _forward(q, k, v, bias, plan, scale, dropout_p):
    from xformers.ops import fmha

    B, T, H, _ = q.shape
    k, v = expand_heads(k, H), expand_heads(v, H)
    y, lse = fmha.memory_efficient_attention_forward_requires_grad(
        _packed(q, plan), _packed(k, plan), _packed(v, plan), _bias(q, k, bias, plan), 0.0, scale
    )
    if bias is not None:
        clear_unseen_(y, lse, bias)
    if plan is not None and plan.packed:
        y, lse = y.view(B, T, *y.shape[2:]), lse.view(H, B, T).transpose(0, 1)  # (1, H, B T) -> (B, H, T)
    return y, lse, (None, None)


def _backward(dy, q, k, v, y, lse, bias, state, plan, scale, dropout_p, bias_grad):
    from xformers.ops import fmha

    (B, T, H, _), Hkv = q.shape, k.shape[2]
    k, v = expand_heads(k, H), expand_heads(v, H)
    if plan is not None and plan.packed:
        lse = lse.transpose(0, 1).reshape(1, H, B * T)
    tensors = [_packed(x, plan) for x in (q, k, v)]
    grads = fmha.memory_efficient_attention_backward(
        _packed(dy, plan), _packed(y, plan), lse, *tensors, _bias(q, k, bias, plan), 0.0, scale
    )
    dq, dk, dv = (g.reshape(x.shape) for g, x in zip(grads, (q, k, v), strict=True))
    return dq, reduce_heads(dk, Hkv), reduce_heads(dv, Hkv), None


PAIR = KernelPair(_forward, _backward)
