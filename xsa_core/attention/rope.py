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
        # MPS and some accelerators lack float64: their tables are made on the host, they are small.
        angles = rotary_angles(
            positions.cpu() if positions.device.type == "mps" else positions, rotated, base
        )
        self.rotated = rotated
        self.cos = angles.cos().to(positions.device, precise)  # (B) T 1 R/2
        self.sin = angles.sin().to(positions.device, precise)
        # Inductor cannot generate code for complex numbers, so a compiled model turns with real ones.
        self.cosine_sine = None if torch.compiler.is_compiling() else torch.complex(self.cos, self.sin)

    def __call__(self, x: Tensor) -> Tensor:
        """Turn the first `rotated` channels of every head. `B T H D -> B T H D`, same dtype."""
        if self.rotated == x.shape[-1]:
            return self._turn(x)
        turned, rest = x.split((self.rotated, x.shape[-1] - self.rotated), dim=-1)
        return torch.cat((self._turn(turned), rest), dim=-1)

    def _turn(self, x: Tensor) -> Tensor:
        pairs = x.to(self.cos.dtype).unflatten(-1, (-1, 2))  # B T H R -> B T H R/2 2
        if self.cosine_sine is not None and not torch.compiler.is_compiling():
            turned = torch.view_as_real(torch.view_as_complex(pairs) * self.cosine_sine)
        else:
            even, odd = pairs.unbind(-1)
            turned = torch.stack((even * self.cos - odd * self.sin, odd * self.cos + even * self.sin), dim=-1)
        return turned.flatten(-2).to(x.dtype)  # B T H R/2 2 -> B T H R
