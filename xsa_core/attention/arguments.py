"""What one call of the public functions may be given; everything else is refused in one line.

B batch   T queries   S keys   H query heads   Hkv key/value heads   N sinks   Dk, Dv head sizes
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from xsa_core.attention import projection
from xsa_core.attention.masks import Mask
from xsa_core.attention.projection import Strength


def is_number(x: object) -> bool:
    """Whether ``x`` is a finite real number: Python's, numpy's or a traced one; bool is not."""
    real = isinstance(x, (Real, torch.SymInt, torch.SymFloat)) and not isinstance(x, bool)
    return real and -math.inf < x < math.inf


def broadcasts(shape: Sequence[int], whole: Sequence[int]) -> bool:
    """Whether a tensor of ``shape`` can be expanded to ``whole``."""
    fits = (a in (1, b) for a, b in zip(reversed(shape), reversed(whole), strict=False))
    return len(shape) <= len(whole) and all(fits)


def check_tensors(**tensors: Any) -> None:
    """Refuse arguments that are no tensors; None is one that was not given.

    Raises:
        ValueError: with the name of the first one.
    """
    for name, x in tensors.items():
        if x is not None and not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a torch tensor, got {_named(x)}; convert it first")


def check_given(**tensors: Any) -> None:
    """Like :func:`check_tensors`, for arguments that must be there."""
    for name, x in tensors.items():
        if x is None:
            raise ValueError(f"{name} must be a torch tensor, got None; pass one")
    check_tensors(**tensors)


def check_strength(strength: Strength | None, *, optional: bool = True) -> None:
    """Refuse what is neither a finite number nor a tensor, nor None where that is allowed.

    Raises:
        ValueError: says what it is. The entries of a tensor are not read.
    """
    if strength is None and optional:
        return
    if not isinstance(strength, Tensor) and not is_number(strength):
        raise ValueError(
            f"strength must be a finite number, or a tensor that broadcasts to (B, T, H), got "
            f"{_named(strength)}; 1 removes all of the component, 0 nothing"
        )


def check_scale(scale: float | None) -> None:
    """Refuse a scale that is no finite number: a tensor would get no gradient.

    Raises:
        ValueError: says what it is.
    """
    if isinstance(scale, Tensor):
        raise ValueError("scale must be a number, got a tensor; multiply q by a learned one, or use .item()")
    if scale is not None and not is_number(scale):
        raise ValueError(f"scale must be a finite number, got {_named(scale)}; the default is 1/sqrt(Dk)")


def check_sinks_pair(sinks: Any) -> None:
    """Refuse sinks that are not a pair of tensors.

    Raises:
        ValueError: says what they are.
    """
    if sinks is None:
        return
    pair = isinstance(sinks, tuple | list) and len(sinks) == 2
    if not pair or not all(isinstance(s, Tensor) and s.dim() == 3 for s in sinks):
        raise ValueError(
            f"sinks must be a pair (sink_k (N, Hkv, Dk), sink_v (N, Hkv, Dv)) of tensors, got {_named(sinks)}"
        )


def check_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sinks: tuple[Tensor, Tensor] | None,
    dropout_p: float,
    scale: float | None,
    causal: bool,
) -> None:
    """Shapes, dtypes and numbers of one call.

    Raises:
        ValueError: for what does not belong together; says what was expected.
    """
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(
            f"q, k, v must be (B, T, H, D), got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}; split "
            "the heads first"
        )
    agree = (
        q.shape[0] == k.shape[0] == v.shape[0] and k.shape[1:3] == v.shape[1:3] and q.shape[3] == k.shape[3]
    )
    if not agree or k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(
            "expected q (B, T, H, Dk), k (B, S, Hkv, Dk), v (B, S, Hkv, Dv) with Hkv dividing H, got "
            f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if 0 in (*q.shape[1:], k.shape[1], v.shape[3]):
        raise ValueError(
            f"attention needs at least one query, key and head, got {tuple(q.shape)}, {tuple(k.shape)}, "
            f"{tuple(v.shape)}; skip the empty sequence"
        )
    if not (q.dtype == k.dtype == v.dtype and q.dtype.is_floating_point):
        raise ValueError(
            f"q, k, v must share one floating dtype, got {q.dtype}, {k.dtype}, {v.dtype}; cast them"
        )
    projection.check_dtype(q)
    check_scale(scale)
    if isinstance(causal, Tensor | Mask | str):
        raise ValueError(f"causal must be True or False, got {_named(causal)}; a Mask goes into mask=")
    if not is_number(dropout_p) or not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p must be in [0, 1), got {_named(dropout_p)}")
    if bias is not None:
        _check_bias(bias, (q.shape[0], q.shape[2], q.shape[1], k.shape[1]))
    if sinks is not None:
        _check_sinks(q, k, v, sinks, dropout_p)


def check_own_values(q: Tensor, k: Tensor, v: Tensor, own_v: Tensor | None, strength: Strength) -> None:
    """The values of the query tokens, and the shape of a strength tensor.

    Raises:
        ValueError: for what does not belong to the call.
    """
    B, T, H, _ = q.shape
    if own_v is None and k.shape[1] != T:
        raise ValueError(
            f"exclusion with {T} queries and {k.shape[1]} keys needs own_v (B, T, Hkv, Dv), the values of "
            "the query tokens; pass own_v, or strength=None for plain attention"
        )
    wanted = (B, T, v.shape[2], v.shape[3])
    if own_v is not None and (tuple(own_v.shape) != wanted or own_v.dtype != v.dtype):
        raise ValueError(
            f"own_v must be {wanted} in {v.dtype}, got {tuple(own_v.shape)} in {own_v.dtype}; pass the "
            "values of the query tokens"
        )
    if isinstance(strength, Tensor):
        projection.expand_strength(strength, B, T, H)


def _check_bias(bias: Tensor, whole: tuple[int, int, int, int]) -> None:
    if not broadcasts(bias.shape, whole) or not bias.is_floating_point():
        raise ValueError(
            f"bias of shape {tuple(bias.shape)} and {bias.dtype} does not broadcast to (B, H, T, S) = "
            f"{whole}; for a boolean mask use mask="
        )


def _check_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: tuple[Tensor, Tensor], dropout_p: float) -> None:
    expected = ((k.shape[2], k.shape[3]), (v.shape[2], v.shape[3]))
    shapes = tuple(tuple(s.shape) for s in sinks)
    if tuple(s[1:] for s in shapes) != expected or shapes[0][0] != shapes[1][0] or shapes[0][0] == 0:
        raise ValueError(
            f"sinks must be (N, Hkv, Dk) = (N, {expected[0][0]}, {expected[0][1]}) and (N, Hkv, Dv) = (N, "
            f"{expected[1][0]}, {expected[1][1]}) with N >= 1, got {shapes[0]} and {shapes[1]}"
        )
    if any(s.dtype != q.dtype for s in sinks):
        raise ValueError(
            f"sinks must have q's dtype {q.dtype}, got {sinks[0].dtype} and {sinks[1].dtype}; cast them"
        )
    if dropout_p:
        raise ValueError("attention dropout cannot be combined with sinks; set dropout_p=0 or use no sinks")


def _named(x: object) -> str:
    """A value in an error message: short ones as they are, others by their type, tensors by their shape."""
    if isinstance(x, Tensor):
        return f"a tensor of shape {tuple(x.shape)}"
    if isinstance(x, tuple | list):
        return f"a {type(x).__name__} of {len(x)}"
    return repr(x) if isinstance(x, Real | str) or x is None else f"a {type(x).__name__}"
