"""Exclusion: remove from an attention output the part that points along the token's own value vector.

    B batch   T tokens   H query heads   Hkv value heads   G = H / Hkv heads per group   D head size

With ``vh = v / |v|`` and ``c = y . vh`` per token and head: ``z = y - s c vh`` (arXiv:2603.09078, Section 3;
the adjoint is derived in :func:`exclude_adjoint`). Query head ``h`` uses value head ``h // G``; values are
broadcast over the group by a view. Everything here is plain torch in the accumulation type (float32 for the
half types); the fast kernels of the same two functions are in :mod:`xsa_core.attention.projection_ops`.
"""

from __future__ import annotations

import torch
from torch import Tensor

Strength = float | Tensor
FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 stays, everything else accumulates in float32.

    Raises:
        ValueError: for a dtype that is not floating.
    """
    if not dtype.is_floating_point:
        raise ValueError(f"attention needs floating tensors, got {dtype}; cast the inputs first")
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_dtype(x: Tensor) -> None:
    """Refuse dtypes without arithmetic: integers, complex numbers, and the storage formats of 8 bits or less.

    Raises:
        ValueError: for anything but float64, float32, bfloat16, float16.
    """
    if x.dtype not in FLOATING:
        raise ValueError(
            f"attention and exclusion work in float64, float32, bfloat16 or float16, got {x.dtype}; "
            "cast the inputs first"
        )


def check_value_shape(y: Tensor, v: Tensor) -> None:
    """Refuse ``v`` whose shape does not belong to ``y``.

    Raises:
        ValueError: if they are not (B, T, H, D) and (B, T, Hkv, D) with Hkv dividing H.
    """
    good = y.dim() == v.dim() == 4 and y.shape[:2] == v.shape[:2] and y.shape[3] == v.shape[3]
    if not good or v.shape[2] == 0 or y.shape[2] % v.shape[2]:
        raise ValueError(
            f"exclusion needs y (B, T, H, D) and v (B, T, Hkv, D) with Hkv dividing H, got {tuple(y.shape)} "
            f"and {tuple(v.shape)}; pass the values of the tokens that y belongs to"
        )


def expand_strength(strength: Tensor, B: int, T: int, H: int) -> Tensor:
    """A strength tensor as a (B, T, H) view; () and (H,) are the usual ones.

    Raises:
        ValueError: if it is complex, or does not broadcast to (B, T, H).
    """
    if strength.is_complex():
        raise ValueError(f"strength must be real, got {strength.dtype}; take its real part")
    try:
        return strength.expand(B, T, H)
    except RuntimeError:
        raise ValueError(
            f"strength of shape {tuple(strength.shape)} does not broadcast to (B, T, H) = {(B, T, H)}; pass "
            "a number, one value per head (H,), or one per token and head"
        ) from None


def unit_and_inverse_norm(v: Tensor) -> tuple[Tensor, Tensor]:
    """``vh = v / |v|`` and ``1 / |v|`` over the last axis, in the accumulation type; shapes (..., D) and
    (..., 1).

    A vector whose largest entry is below the smallest normal number of its dtype counts as zero: both results
    are 0, so nothing is removed and no gradient divides by it. Others are scaled by their largest entry
    first, so that the square of a tiny or huge entry neither vanishes nor overflows. NaN and infinite entries
    have no direction: both results are NaN, so that the fault shows.
    """
    tiny = torch.finfo(v.dtype).tiny
    v = v.to(accumulation_dtype(v.dtype))
    # The unit vector does not depend on the scale, so the scale is a constant to autograd.
    largest = v.detach().abs().amax(dim=-1, keepdim=True)
    alive = ~(largest < tiny)  # true for NaN
    largest = torch.where(alive, largest, torch.ones_like(largest))
    scaled = v / largest
    squares = scaled.square().sum(dim=-1, keepdim=True)  # in [1, D] for a live vector
    norm = torch.where(alive, squares, torch.ones_like(squares)).sqrt()
    zero = torch.zeros((), dtype=v.dtype, device=v.device)
    return torch.where(alive, scaled / norm, zero), torch.where(alive, 1 / norm / largest, zero)


def exclude_forward(y: Tensor, v: Tensor, strength: Strength = 1.0) -> tuple[Tensor, Tensor]:
    """``z = y - s c vh`` in y's dtype, and ``c = y . vh`` in the accumulation type.

    Args:
        y: (B, T, H, D) attention output.
        v: (B, T, Hkv, D) values of the same tokens.
        strength: a number, or a tensor that broadcasts to (B, T, H).

    Returns:
        z (B, T, H, D), c (B, T, H).
    """
    check_value_shape(y, v)
    B, T, H, _ = y.shape
    vh, _ = unit_and_inverse_norm(v)
    grouped = y.to(vh.dtype).unflatten(2, (v.shape[2], -1))  # (B, T, Hkv, G, D)
    vh = vh.unsqueeze(3)  # (B, T, Hkv, 1, D)
    c = (grouped * vh).sum(dim=-1)  # (B, T, Hkv, G)
    removed = c * _grouped_strength(strength, c, B, T, H)
    z = grouped - removed.unsqueeze(-1) * vh
    return z.flatten(2, 3).to(y.dtype), c.flatten(2, 3)


def exclude_adjoint(
    g: Tensor, z: Tensor, v: Tensor, c: Tensor, strength: Strength = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of :func:`exclude_forward` from what its caller still holds: the output ``z`` and the scalar
    ``c``.

    With ``a = g . vh``: ``dy = g - s a vh``, ``dv = -s [a z + c g + (s - 2) c a vh] / |v|`` summed over the
    group, and ``ds = -c a`` per token and head. Computed as ``(a/|v|) (z + (s - 2) c vh) + (c/|v|) g``: no
    intermediate leaves the range of numbers unless ``|y|/|v|``, ``|g|/|v|`` or the result does.

    Derivation: ``z = y - s (y.v) v / (v.v)``, so ``dv = -s [(g.v) y + (y.v) g - 2 (y.v)(g.v) v / (v.v)] /
    (v.v)``; put ``y = z + s c vh``.

    Args:
        g: (B, T, H, D) gradient of z.
        z: (B, T, H, D) output of the forward.
        v: (B, T, Hkv, D).
        c: (B, T, H) from the forward.
        strength: as in the forward.

    Returns:
        dy (B, T, H, D) in g's dtype, dv (B, T, Hkv, D) in v's dtype, ds (B, T, H) in the accumulation type.
    """
    B, T, H, _ = g.shape
    heads = (v.shape[2], H // v.shape[2])
    vh, inverse = unit_and_inverse_norm(v)
    vh, inverse = vh.unsqueeze(3), inverse.unsqueeze(3)  # (B, T, Hkv, 1, D), (B, T, Hkv, 1, 1)
    grouped, zg, cg = (x.to(vh.dtype).unflatten(2, heads) for x in (g, z, c))
    cg = cg.unsqueeze(-1)  # (B, T, Hkv, G, 1)
    s = _grouped_strength(strength, cg.squeeze(-1), B, T, H)
    s = s.unsqueeze(-1) if isinstance(s, Tensor) else s
    a = (grouped * vh).sum(dim=-1, keepdim=True)  # (B, T, Hkv, G, 1)
    dy = grouped - s * a * vh
    inner = (a * inverse) * (zg + (s - 2) * cg * vh) + (cg * inverse) * grouped
    dv = (-s * inner).sum(dim=3)  # (B, T, Hkv, D)
    ds = -(cg * a).squeeze(-1).flatten(2, 3)
    return dy.flatten(2, 3).to(g.dtype), dv.to(v.dtype), ds


def restore(z: Tensor, v: Tensor, c: Tensor, strength: Strength = 1.0) -> Tensor:
    """``y = z + s c vh``: the attention output before exclusion, (B, T, H, D) in z's dtype."""
    B, T, H, _ = z.shape
    vh, _ = unit_and_inverse_norm(v)
    cg = c.to(vh.dtype).unflatten(2, (v.shape[2], -1))
    put_back = cg * _grouped_strength(strength, cg, B, T, H)
    y = z.to(vh.dtype).unflatten(2, (v.shape[2], -1)) + put_back.unsqueeze(-1) * vh.unsqueeze(3)
    return y.flatten(2, 3).to(z.dtype)


def _grouped_strength(strength: Strength, like: Tensor, B: int, T: int, H: int) -> Strength:
    """Strength as it multiplies a (B, T, Hkv, G) tensor."""
    if not isinstance(strength, Tensor):
        return strength
    return expand_strength(strength, B, T, H).to(like.dtype).unflatten(2, (like.shape[2], -1))
