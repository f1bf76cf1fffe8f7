"""Triton kernels of the exclusion for CUDA: forward in place or not, and the adjoint, each in one pass.

    B batch   T tokens   H query heads   Hkv value heads   G = H / Hkv   D head size

A program takes ROWS rows of (token, value head) and walks the G query heads of the group with the value row
in registers, so ``dv`` is summed there and the strength's gradient is written per token and head: no atomics,
hence nothing that a repeated launch could add twice. The launch depends on D alone; there is no tuning, so no
sequence length triggers any. Sums run in float32 (float64 for float64). The formulas are those of
:mod:`xsa_core.attention.projection`.
"""

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl
from torch import Tensor

from xsa_core.attention.projection import accumulation_dtype

# Elements of a value row block a program holds: 2048 float32 values are 16 registers for each of 128 threads.
_BLOCK_ELEMENTS = 2048


@triton.jit
def _direction(v_ptr, offset, inside, TINY: tl.constexpr, ACC: tl.constexpr):
    """``vh`` (ROWS, BLOCK_D) and ``1/|v|`` (ROWS,), both 0 where the largest entry is below ``TINY``, both
    NaN where an entry is NaN or infinite."""
    row = tl.load(v_ptr + offset, mask=inside, other=0.0).to(ACC)
    largest = tl.max(tl.abs(row), axis=1)
    faulty = tl.sum((row != row).to(tl.int32), axis=1) > 0  # the maximum of a GPU skips NaN
    large = largest >= TINY
    alive = large | faulty
    largest = tl.where(large, largest, 1.0)
    scaled = row / largest[:, None]
    squares = tl.where(alive, tl.sum(scaled * scaled, axis=1), 1.0)
    norm = tl.sqrt(squares)
    unit = tl.where(alive[:, None], scaled / norm[:, None], 0.0)
    return unit, tl.where(alive, 1.0 / norm / largest, 0.0)


@triton.jit
def _place(rows, T, heads, ROWS: tl.constexpr):
    """This program's rows: flat index, live or not, batch, token, value head; 64 bits for the offsets."""
    index = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return index, index < rows, index // (heads * T), (index // heads) % T, index % heads


@triton.jit
def _forward_kernel(
    y_ptr,
    v_ptr,
    z_ptr,
    c_ptr,
    s_ptr,
    factor,
    rows,
    T,
    heads,
    yb,
    yt,
    yh,
    vb,
    vt,
    vh_stride,
    zb,
    zt,
    zh,
    sb,
    st,
    sh,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    G: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_STRENGTH: tl.constexpr,
    TINY: tl.constexpr,
    ACC: tl.constexpr,
):
    index, live, b, t, hv = _place(rows, T, heads, ROWS)
    d = tl.arange(0, BLOCK_D)
    inside = live[:, None] & (d < D)[None, :]
    unit, _ = _direction(v_ptr, (b * vb + t * vt + hv * vh_stride)[:, None] + d[None, :], inside, TINY, ACC)
    for j in range(G):
        h = hv * G + j
        y = tl.load(y_ptr + (b * yb + t * yt + h * yh)[:, None] + d[None, :], mask=inside, other=0.0).to(ACC)
        along = tl.sum(y * unit, axis=1)
        tl.store(c_ptr + index * G + j, along, mask=live)
        removed = along * factor
        if HAS_STRENGTH:
            removed = along * tl.load(s_ptr + b * sb + t * st + h * sh, mask=live, other=0.0)
        z = y - removed[:, None] * unit
        z_place = z_ptr + (b * zb + t * zt + h * zh)[:, None] + d[None, :]
        tl.store(z_place, z.to(z_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(
    g_ptr,
    z_ptr,
    v_ptr,
    c_ptr,
    s_ptr,
    dy_ptr,
    dv_ptr,
    ds_ptr,
    y_ptr,
    factor,
    rows,
    T,
    heads,
    gb,
    gt,
    gh,
    zb,
    zt,
    zh,
    vb,
    vt,
    vh_stride,
    sb,
    st,
    sh,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    G: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_STRENGTH: tl.constexpr,
    WANT_DS: tl.constexpr,
    RESTORE: tl.constexpr,
    TINY: tl.constexpr,
    ACC: tl.constexpr,
):
    index, live, b, t, hv = _place(rows, T, heads, ROWS)
    d = tl.arange(0, BLOCK_D)
    inside = live[:, None] & (d < D)[None, :]
    unit, inverse = _direction(
        v_ptr, (b * vb + t * vt + hv * vh_stride)[:, None] + d[None, :], inside, TINY, ACC
    )
    total = tl.zeros((ROWS, BLOCK_D), dtype=ACC)
    for j in range(G):
        h = hv * G + j
        flat = index * G + j
        g = tl.load(g_ptr + (b * gb + t * gt + h * gh)[:, None] + d[None, :], mask=inside, other=0.0).to(ACC)
        z = tl.load(z_ptr + (b * zb + t * zt + h * zh)[:, None] + d[None, :], mask=inside, other=0.0).to(ACC)
        c = tl.load(c_ptr + flat, mask=live, other=0.0)
        a = tl.sum(g * unit, axis=1)
        s = tl.zeros_like(a) + factor
        if HAS_STRENGTH:
            s = tl.load(s_ptr + b * sb + t * st + h * sh, mask=live, other=0.0)
        if WANT_DS:
            tl.store(ds_ptr + flat, -c * a, mask=live)
        dense = flat[:, None] * D + d[None, :]
        dy = g - (s * a)[:, None] * unit
        tl.store(dy_ptr + dense, dy.to(dy_ptr.dtype.element_ty), mask=inside)
        if RESTORE:
            y = z + (s * c)[:, None] * unit
            tl.store(y_ptr + dense, y.to(y_ptr.dtype.element_ty), mask=inside)
        # dv = -s [a (z + (s - 2) c vh) + c g] / |v|
        mirrored = z + ((s - 2.0) * c)[:, None] * unit
        total -= (s * a * inverse)[:, None] * mirrored + (s * c * inverse)[:, None] * g
    tl.store(dv_ptr + index[:, None] * D + d[None, :], total.to(dv_ptr.dtype.element_ty), mask=inside)


def _exact_strength(y: Tensor, factor: float, strength: Tensor | None) -> Tensor | None:
    """For float64 the number as a tensor: Triton takes its scalar arguments in float32."""
    if strength is not None or y.dtype != torch.float64:
        return strength
    return y.new_full((), factor).expand(y.shape[:3])


def _launch(
    kernel, tensors, strided, v: Tensor, heads: int, factor: float, strength: Tensor | None, **flags
) -> None:
    """One launch over all rows; ``strided`` are those whose B, T, H strides the kernel takes, in order."""
    B, T, kv_heads, D = v.shape
    acc = accumulation_dtype(v.dtype)
    block = triton.next_power_of_2(D)
    rows_per_program = max(1, _BLOCK_ELEMENTS // block)
    rows = B * T * kv_heads
    strides = [stride for x in strided for stride in x.stride()[:3]]
    strides += strength.stride() if strength is not None else (0, 0, 0)
    # Triton launches on the current device, which need not be the tensors'.
    place = torch.cuda.device(v.device) if v.is_cuda else contextlib.nullcontext()
    with place:
        kernel[(triton.cdiv(rows, rows_per_program),)](
            *tensors,
            factor,
            rows,
            T,
            kv_heads,
            *strides,
            D=D,
            BLOCK_D=block,
            G=heads // kv_heads,
            ROWS=rows_per_program,
            HAS_STRENGTH=strength is not None,
            TINY=torch.finfo(v.dtype).tiny,
            ACC=tl.float64 if acc == torch.float64 else tl.float32,
            num_warps=4,
            **flags,
        )


def exclude_(y: Tensor, v: Tensor, factor: float, strength: Tensor | None) -> Tensor:
    """Overwrite ``y`` (B, T, H, D) with ``z``; returns ``c`` (B, T, H)."""
    c = y.new_empty(y.shape[:3], dtype=accumulation_dtype(y.dtype))
    strength = _exact_strength(y, factor, strength)
    pointers = (y, v, y, c, strength if strength is not None else c)
    _launch(_forward_kernel, pointers, (y, v, y), v, y.shape[2], factor, strength)
    return c


def exclude(y: Tensor, v: Tensor, factor: float, strength: Tensor | None) -> tuple[Tensor, Tensor]:
    """``z`` (B, T, H, D) and ``c`` (B, T, H), ``y`` left as it is."""
    c = y.new_empty(y.shape[:3], dtype=accumulation_dtype(y.dtype))
    z = y.new_empty(y.shape)
    strength = _exact_strength(y, factor, strength)
    pointers = (y, v, z, c, strength if strength is not None else c)
    _launch(_forward_kernel, pointers, (y, v, z), v, y.shape[2], factor, strength)
    return z, c


def exclude_backward(
    g: Tensor, z: Tensor, v: Tensor, c: Tensor, factor: float, strength: Tensor | None, restore: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dy (B, T, H, D), dv (B, T, Hkv, D), ds (B, T, H), y (B, T, H, D); the last two empty if not wanted."""
    dy, dv = g.new_empty(g.shape), v.new_empty(v.shape)
    ds = torch.empty_like(c) if strength is not None else c.new_empty(0)
    y = z.new_empty(z.shape) if restore else z.new_empty(0)
    want_ds = strength is not None
    strength = _exact_strength(g, factor, strength)
    pointers = (g, z, v, c, strength if strength is not None else c, dy, dv, ds, y)
    flags = {"RESTORE": restore, "WANT_DS": want_ds}
    _launch(_backward_kernel, pointers, (g, z, v), v, g.shape[2], factor, strength, **flags)
    return dy, dv, ds, y


_registered = False


def register(library: torch.library.Library) -> None:
    """Make these the CUDA implementations of the operators that ``library`` declares; once."""
    global _registered
    if not _registered:
        library.impl("exclude_", exclude_, "CUDA")
        library.impl("exclude", exclude, "CUDA")
        library.impl("exclude_backward", exclude_backward, "CUDA")
        _registered = True
