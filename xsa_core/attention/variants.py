"""The variants of self attention that experiments compare, as one table.

Axes: B batch, T queries, S keys, H query heads, Hkv key/value heads, D channels of a head.

Every variant is a small module between the projections of an attention layer: it takes `q (B T H D)`, `k` and
`v (B S Hkv D)` and the values of the query tokens themselves, and gives heads `B T H D`. What it
learns or keeps lives in it, so a converted model of another library holds the same thing that
`SelfAttention` does.

With `y` the attention output, `v` the token's own value, `u_x = x / |x|`:

    sa                y
    xsa               y - s (y . u_v) u_v                       arXiv:2603.09078, Section 3
    xsa_learned       y - tanh(p) (y . u_v) u_v                 p per layer and head, 0 at start
    random_direction  y - s (y . r) r                           r a fixed random unit vector per head
    mean_direction    y - s (y . u_m) u_m                       m the mean value over the visible tokens
    head_norm         g * y / rms(y)                            g per head and channel, 1 at start
    diag_masked       y without the token's own key, unless it sees nothing else
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from xsa_core.attention.functional import exclude, exclusive_attention
from xsa_core.attention.masks import Mask, resolve_mask
from xsa_core.attention.projection import accumulation_dtype
from xsa_core.roles import ParameterRole, Role


@dataclass(frozen=True)
class Call:
    """How attention is to be computed, passed through to `exclusive_attention` unchanged.

    Attributes:
        causal, mask, bias, scale, dropout_p, backend: as there.
        sinks: `(N Hkv D, N Hkv D)` learned keys and values, or None.
    """

    causal: bool = False
    mask: Mask | None = None
    bias: Tensor | None = None
    scale: float | None = None
    dropout_p: float = 0.0
    sinks: tuple[Tensor, Tensor] | None = None
    backend: str = "auto"

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        own_v: Tensor | None = None,
        strength: float | Tensor | None = None,
    ) -> Tensor:
        """`B T H D`; plain attention where `strength` is None."""
        return exclusive_attention(
            q,
            k,
            v,
            causal=self.causal,
            mask=self.mask,
            bias=self.bias,
            own_v=None if own_v is v else own_v,  # one gradient instead of two that must be added
            strength=strength,
            scale=self.scale,
            dropout_p=self.dropout_p,
            backend=self.backend,
            sinks=self.sinks,
        )


class Variant(nn.Module):
    """Plain attention (`sa`), and the base of the others.

    Args:
        n_heads: H. head_dim: D. strength: share of the component that is removed, where the variant has one.
    """

    def __init__(self, n_heads: int, head_dim: int, strength: float = 1.0) -> None:
        super().__init__()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, own_v: Tensor, call: Call) -> Tensor:
        """Heads of the layer.

        Args:
            q: `B T H D`. k, v: `B S Hkv D`. own_v: `B T Hkv D`, values of the query tokens.
            call: how to attend.

        Returns:
            `B T H D`.
        """
        return call.attend(q, k, v)

    def prepare(self, call: Call) -> Call:
        """The call as this variant makes it; the identity but for `diag_masked`."""
        return call


class Exclusive(Variant):
    """`xsa`: the component along the own value is removed, wholly or by a fixed share."""

    def __init__(self, n_heads: int, head_dim: int, strength: float = 1.0) -> None:
        super().__init__(n_heads, head_dim)
        self.strength = float(strength)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, own_v: Tensor, call: Call) -> Tensor:
        """See `Variant.forward`."""
        return call.attend(q, k, v, own_v, self.strength)

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        return f"strength={self.strength}"


class LearnedExclusive(Variant):
    """`xsa_learned`: the share is `tanh(p)` of a parameter per head: training starts from plain attention."""

    def __init__(self, n_heads: int, head_dim: int, strength: float = 1.0) -> None:
        super().__init__(n_heads, head_dim)
        self.raw_strength = nn.Parameter(torch.zeros(n_heads))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, own_v: Tensor, call: Call) -> Tensor:
        """See `Variant.forward`."""
        return call.attend(q, k, v, own_v, torch.tanh(self.raw_strength))

    def declared_roles(self) -> dict[str, ParameterRole]:
        """Strengths get neither decay nor Muon."""
        return {"raw_strength": ParameterRole(Role.STRENGTH)}


class RandomDirection(Variant):
    """`random_direction`: does removing *any* one direction per head help? `r` is kept with the weights."""

    def __init__(self, n_heads: int, head_dim: int, strength: float = 1.0) -> None:
        super().__init__(n_heads, head_dim)
        self.strength = float(strength)
        self.register_buffer("direction", torch.empty(n_heads, head_dim))
        if not self.direction.is_meta:
            self.direction.copy_(self.seeded_buffers()["direction"](torch.Generator().manual_seed(0)))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, own_v: Tensor, call: Call) -> Tensor:
        """See `Variant.forward`."""
        y = call.attend(q, k, v)
        return exclude(y, self.direction.to(y.dtype).expand_as(y), self.strength)

    def seeded_buffers(self) -> dict[str, Callable[[torch.Generator], Tensor]]:
        """How `initialize` draws the directions: uniform on the unit sphere, float32 `H D`."""
        shape = self.direction.shape

        def draw(generator: torch.Generator) -> Tensor:
            x = torch.randn(shape, generator=generator)
            return x / x.norm(dim=-1, keepdim=True)

        return {"direction": draw}

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        return f"strength={self.strength}"


class MeanDirection(Variant):
    """`mean_direction`: is it the *own* value that matters, or what the values of all visible tokens share?

    The mean over the visible tokens is attention with equal weights, that is with zero queries: right for
    every mask, grouped heads and the cache, by the same kernel.
    """

    def __init__(self, n_heads: int, head_dim: int, strength: float = 1.0) -> None:
        super().__init__(n_heads, head_dim)
        self.strength = float(strength)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, own_v: Tensor, call: Call) -> Tensor:
        """See `Variant.forward`."""
        y = call.attend(q, k, v)
        return exclude(y, visible_mean(k, v, q.shape[1], call), self.strength)

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        return f"strength={self.strength}"


class HeadNorm(Variant):
    """`head_norm`: is it the changed scale of a head that matters? RMSNorm of each head's output."""

    eps = 1e-6

    def __init__(self, n_heads: int, head_dim: int, strength: float = 1.0) -> None:
        super().__init__(n_heads, head_dim)
        self.gain = nn.Parameter(torch.ones(n_heads, head_dim))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, own_v: Tensor, call: Call) -> Tensor:
        """See `Variant.forward`."""
        y = call.attend(q, k, v)
        exact = y.to(accumulation_dtype(y.dtype))
        scale = torch.rsqrt(exact.square().mean(dim=-1, keepdim=True) + self.eps)
        return (exact * scale * self.gain).to(y.dtype)

    def declared_roles(self) -> dict[str, ParameterRole]:
        """The gain is that of a norm."""
        return {"gain": ParameterRole(Role.NORM)}


class DiagonalMasked(Variant):
    """`diag_masked`: the own value is kept out of the sum instead of being removed from it."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, own_v: Tensor, call: Call) -> Tensor:
        """See `Variant.forward`."""
        return self.prepare(call).attend(q, k, v)

    def prepare(self, call: Call) -> Call:
        """The mask without the diagonal."""
        mask = resolve_mask(call.causal, call.mask)
        return replace(call, causal=False, mask=replace(mask, exclude_self=True))


def visible_mean(k: Tensor, v: Tensor, queries: int, call: Call) -> Tensor:
    """Mean of the values each query may attend, sinks not counted.

    Args:
        k, v: `B S Hkv D`. queries: T, the last of them. call: its masks are used, and its bias where that
            hides a key altogether (half of the dtype's lowest number or less).

    Returns:
        `B T Hkv D`.
    """
    zero = k.new_zeros(()).expand(k.shape[0], queries, k.shape[2], k.shape[3])
    hidden = None
    if call.bias is not None:
        lowest = torch.finfo(call.bias.dtype).min / 2
        hidden = torch.zeros_like(call.bias).masked_fill_(call.bias.detach() <= lowest, -torch.inf)
        if hidden.dim() > 2 and hidden.shape[-3] not in (
            1,
            k.shape[2],
        ):  # one row per query head: the group's first stands for it
            hidden = hidden[..., :: hidden.shape[-3] // k.shape[2], :, :]
    return replace(call, sinks=None, bias=hidden, dropout_p=0.0).attend(zero, k, v)


@dataclass(frozen=True)
class VariantSpec:
    """One row of the table.

    Attributes:
        name: as configurations write it.
        build: module class.
        summary: one line for people.
        takes_strength: whether a fixed strength other than 1 means anything.
        control: whether it is a control of the experiments rather than the method.
        exclusive: whether the output is made orthogonal to the own value (at strength 1).
    """

    name: str
    build: type[Variant]
    summary: str
    takes_strength: bool = False
    control: bool = False
    exclusive: bool = field(default=False)


VARIANTS: dict[str, VariantSpec] = {
    spec.name: spec
    for spec in (
        VariantSpec("sa", Variant, "plain self attention"),
        VariantSpec(
            "xsa", Exclusive, "the part along the own value removed", takes_strength=True, exclusive=True
        ),
        VariantSpec(
            "xsa_learned", LearnedExclusive, "a learned share of that part removed, per head, none at start"
        ),
        VariantSpec(
            "random_direction",
            RandomDirection,
            "a fixed random direction removed",
            takes_strength=True,
            control=True,
        ),
        VariantSpec(
            "mean_direction",
            MeanDirection,
            "the mean visible value removed",
            takes_strength=True,
            control=True,
        ),
        VariantSpec("head_norm", HeadNorm, "RMSNorm of each head's output", control=True),
        VariantSpec("diag_masked", DiagonalMasked, "a token may not attend itself", control=True),
    )
}


def check_strength(variant: str, strength: float) -> None:
    """Refuse a strength that would do nothing or harm.

    Raises:
        ValueError: not finite, or given to a variant that has none.
    """
    if not isinstance(strength, int | float) or not math.isfinite(strength):
        raise ValueError(f"strength must be a finite number, got {strength!r}")
    if strength != 1.0 and not VARIANTS[variant].takes_strength:
        able = ", ".join(name for name, spec in VARIANTS.items() if spec.takes_strength)
        raise ValueError(
            f"variant {variant} has no fixed strength, got {strength}: leave it at 1 or use one of {able}"
        )


def build_variant(name: str, n_heads: int, head_dim: int, strength: float = 1.0) -> Variant:
    """The module of a variant.

    Raises:
        ValueError: unknown name, or a strength it cannot use.
    """
    if name not in VARIANTS:
        raise ValueError(f"unknown attention variant {name!r}: expected one of {', '.join(VARIANTS)}")
    check_strength(name, strength)
    return VARIANTS[name].build(n_heads, head_dim, strength)
