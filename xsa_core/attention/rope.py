"""Rotary position embedding (Su et al., arXiv:2104.09864) as a rotation of adjacent channel pairs.

Axes: B batch, T positions, H heads, D channels of a head, R rotated channels (R <= D, even).

A pair `(x[2i], x[2i+1])` at position p is turned by the angle `p * base**(-2i/R)`. Read as a complex number
the rotation is one multiplication, which on a CPU is several times cheaper than the usual four half-width
products. Angles are float32 (float64 for float64 inputs) whatever the model's dtype: in bfloat16
neighbouring positions beyond 256 would share one angle.
"""

import torch
from torch import Tensor


def rotary_angles(positions: Tensor, rotated: int, base: float = 10000.0) -> Tensor:
    """Angles of every position and channel pair.

    Args:
        positions: `T` or `B T`, integers.
        rotated: number of rotated channels R, even and positive.
        base: wavelength base; the slowest pair turns once in about `2 pi base` positions.

    Returns:
        `T 1 R/2` or `B T 1 R/2` in float64: positions of any size stay exact, and the table is small.

    Raises:
        ValueError: `rotated` is odd or not positive.
    """
    if rotated <= 0 or rotated % 2:
        raise ValueError(
            f"rotary embedding turns pairs of channels: expected a positive even number, got {rotated}"
        )
    exponents = torch.arange(0, rotated, 2, dtype=torch.float64, device=positions.device) / rotated  # R/2
    return (positions.to(torch.float64)[..., None] * base**-exponents).unsqueeze(-2)


def _turn_complex(x: Tensor, cosine_sine: Tensor) -> Tensor:
    """Turn all pairs by one complex product. `B T H R`, complex `(B) T 1 R/2` -> `B T H R` in x's dtype."""
    wide = x.to(cosine_sine.real.dtype)
    if wide.stride(-1) != 1 or any(s % 2 for s in (*wide.stride()[:-1], wide.storage_offset())):
        wide = wide.contiguous()  # pairs must lie where complex numbers could
    turned = torch.view_as_real(torch.view_as_complex(wide.unflatten(-1, (-1, 2))) * cosine_sine)
    return turned.flatten(-2).to(x.dtype)  # B T H R/2 2 -> B T H R


def _turn_real(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same with real numbers, for compilers that know no complex ones."""
    even, odd = x.to(cos.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2).to(x.dtype)


@torch.library.custom_op("xsa::rotate", mutates_args=())
def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`_turn_complex` as one node of a graph."""
    return _turn_complex(x, torch.complex(cos, sin)).contiguous()


@_rotate.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _rotate_setup(ctx, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _rotate_backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
    cos, sin = ctx.saved_tensors
    return _rotate(grad, cos, -sin), None, None  # a rotation's transpose turns back


_rotate.register_autograd(_rotate_backward, setup_context=_rotate_setup)


class Rotation:
    """The rotation of one set of positions, made once and shared by all layers of a model.

    Args:
        positions: `T` or `B T`, integers.
        rotated: channels turned per head (the rest passes unchanged: partial rotary embedding).
        base: see `rotary_angles`.
        dtype: dtype of the heads that will be turned; float64 keeps float64 angles, all else gets float32.
    """

    __slots__ = ("cos", "cosine_sine", "rotated", "sin")

    def __init__(self, positions: Tensor, rotated: int, base: float, dtype: torch.dtype) -> None:
        precise = torch.float64 if dtype == torch.float64 else torch.float32
        # MPS lacks float64: its tables are made on the host, they are small.
        angles = rotary_angles(
            positions.cpu() if positions.device.type == "mps" else positions, rotated, base
        )
        self.rotated = rotated
        self.cos = angles.cos().to(positions.device, precise)  # (B) T 1 R/2
        self.sin = angles.sin().to(positions.device, precise)
        self.cosine_sine = None if torch.compiler.is_compiling() else torch.complex(self.cos, self.sin)

    def __call__(self, x: Tensor) -> Tensor:
        """Turn the first `rotated` channels of every head. `B T H D -> B T H D`, same dtype."""
        if self.rotated == x.shape[-1]:
            return self._turn(x)
        turned, rest = x.split((self.rotated, x.shape[-1] - self.rotated), dim=-1)
        return torch.cat((self._turn(turned), rest), dim=-1)

    def _turn(self, x: Tensor) -> Tensor:
        if self.cosine_sine is not None and not torch.compiler.is_compiling():
            return _turn_complex(x, self.cosine_sine)
        # Inductor generates no code for complex numbers, and on a CPU its code for interleaved real pairs is
        # not vectorised: measured, it took a quarter of a whole training step of one block.
        if x.device.type == "cpu":
            return _rotate(x, self.cos, self.sin)
        return _turn_real(x, self.cos, self.sin)
