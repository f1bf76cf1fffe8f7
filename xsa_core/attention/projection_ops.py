"""The projection as the operators use it: one fused pass where a compiled kernel exists, plain torch
elsewhere.

The operators ``xsa::exclude_``, ``xsa::exclude`` and ``xsa::exclude_backward`` are declared here; the C++
kernel implements them for CPU tensors and the Triton kernels for CUDA ones, so that a traced graph holds them
as single nodes.

    B batch   T tokens   H query heads   Hkv value heads   D head size

Strength arrives in two arguments: ``factor``, a number, and ``strength``, a (B, T, H) tensor in the
accumulation type or None that replaces it.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from xsa_core.attention import cpu_kernel, projection
from xsa_core.attention.constants import compile_time_constant
from xsa_core.attention.projection import accumulation_dtype

_LIBRARY = torch.library.Library("xsa", "DEF")
_LIBRARY.define("exclude_(Tensor(a!) y, Tensor v, float factor, Tensor? strength) -> Tensor")
_LIBRARY.define("exclude(Tensor y, Tensor v, float factor, Tensor? strength) -> (Tensor, Tensor)")
_LIBRARY.define(
    "exclude_backward(Tensor g, Tensor z, Tensor v, Tensor c, float factor, Tensor? strength, bool restore) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)


@torch.library.register_fake("xsa::exclude_", lib=_LIBRARY)
def _(y, v, factor, strength):
    return y.new_empty(y.shape[:3], dtype=accumulation_dtype(y.dtype))


@torch.library.register_fake("xsa::exclude", lib=_LIBRARY)
def _(y, v, factor, strength):
    return y.new_empty(y.shape), y.new_empty(y.shape[:3], dtype=accumulation_dtype(y.dtype))


@torch.library.register_fake("xsa::exclude_backward", lib=_LIBRARY)
def _(g, z, v, c, factor, strength, restore):
    ds = torch.empty_like(c) if strength is not None else c.new_empty(0)
    y = z.new_empty(z.shape) if restore else z.new_empty(0)
    return g.new_empty(g.shape), v.new_empty(v.shape), ds, y


@compile_time_constant
def _triton_ready() -> bool:
    """Whether the Triton kernels serve CUDA tensors; registers them on the first call."""
    if importlib.util.find_spec("triton") is None:
        return False
    from xsa_core.attention import kernels

    kernels.register(_LIBRARY)
    return True


def compiled(x: Tensor) -> bool:
    """Whether a compiled kernel serves tensors like ``x``."""
    device = x.device.type
    if device == "cpu":
        return cpu_kernel.ready()
    return device == "cuda" and _triton_ready()


def exclude_into(y: Tensor, v: Tensor, factor: float, strength: Tensor | None) -> Tensor:
    """Overwrite ``y`` with ``z`` and return ``c = y . vh`` (B, T, H) in the accumulation type."""
    if compiled(y):
        return torch.ops.xsa.exclude_.default(y, v, factor, strength)
    z, c = projection.exclude_forward(y, v, factor if strength is None else strength)
    y.copy_(z)
    return c


def exclude_out_of_place(
    y: Tensor, v: Tensor, factor: float, strength: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``z`` (B, T, H, D) and ``c`` (B, T, H), ``y`` left as it is."""
    if compiled(y):
        return torch.ops.xsa.exclude.default(y, v, factor, strength)
    return projection.exclude_forward(y, v, factor if strength is None else strength)


def exclude_backward(
    g: Tensor, z: Tensor, v: Tensor, c: Tensor, factor: float, strength: Tensor | None, *, restore: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The adjoint in one pass.

    Returns:
        dy (B, T, H, D), dv (B, T, Hkv, D), ds (B, T, H) or None without a strength tensor, and ``y`` rebuilt
        from ``z`` (B, T, H, D) where ``restore`` asks for it, else None.
    """
    if compiled(g):
        dy, dv, ds, y = torch.ops.xsa.exclude_backward.default(g, z, v, c, factor, strength, restore)
        return dy, dv, ds if strength is not None else None, y if restore else None
    s = factor if strength is None else strength
    dy, dv, ds = projection.exclude_adjoint(g, z, v, c, s)
    y = projection.restore(z, v, c, s) if restore else None
    return dy, dv, ds if strength is not None else None, y
