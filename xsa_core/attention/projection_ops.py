"""The projection as the operators use it: one fused pass where a compiled kernel exists, plain torch
elsewhere.

    B batch   T tokens   H query heads   Hkv value heads   D head size

Strength arrives in two arguments: ``factor``, a number, and ``strength``, a (B, T, H) tensor or None that
replaces it.
"""

from __future__ import annotations

from torch import Tensor

from xsa_core.attention import projection


def exclude_into(y: Tensor, v: Tensor, factor: float, strength: Tensor | None) -> Tensor:
    """Overwrite ``y`` with ``z`` and return ``c = y . vh`` (B, T, H) in the accumulation type."""
    z, c = projection.exclude_forward(y, v, factor if strength is None else strength)
    y.copy_(z)
    return c


def exclude_out_of_place(
    y: Tensor, v: Tensor, factor: float, strength: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``z`` (B, T, H, D) and ``c`` (B, T, H), ``y`` left as it is."""
    return projection.exclude_forward(y, v, factor if strength is None else strength)


def exclude_backward(
    g: Tensor, z: Tensor, v: Tensor, c: Tensor, factor: float, strength: Tensor | None, *, restore: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The adjoint in one pass.

    Returns:
        dy (B, T, H, D), dv (B, T, Hkv, D), ds (B, T, H) or None without a strength tensor, and ``y`` rebuilt
        from ``z`` (B, T, H, D) where ``restore`` asks for it, else None.
    """
    s = factor if strength is None else strength
    dy, dv, ds = projection.exclude_adjoint(g, z, v, c, s)
    y = projection.restore(z, v, c, s) if restore else None
    return dy, dv, ds if strength is not None else None, y
