"""SelfAttention: the layer around the operator: projections, rotary positions, sinks, cache, gate.

Axes: B batch, T tokens, S keys (cached ones included), C width, H query heads, Hkv key/value heads, D head
    channels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from xsa_core.attention.arguments import broadcasts, is_number
from xsa_core.attention.backends import check_backend_name
from xsa_core.attention.cache import LayerCache, check_positions, default_positions, unchanged_on_error
from xsa_core.attention.masks import Mask, resolve_mask
from xsa_core.attention.rope import Rotation
from xsa_core.attention.variants import Call, build_variant
from xsa_core.roles import ParameterRole, Role

Observer = Callable[[Tensor, Tensor, Tensor, Tensor, Call], None]


class SelfAttention(nn.Module):
    """Self attention of any variant, `B T C -> B T C`.

    Order: projection, query-key norm, rotation, attention, exclusion, gate, output
    projection. Exclusion uses the values that attention used: with value embeddings the changed ones, with a
    cache those of the new tokens.

    Args:
        d_model: C.
        n_heads: H. n_kv_heads: Hkv, a divisor of H; H by default.
        head_dim: D, `d_model / n_heads` by default.
        variant: a key of `VARIANTS`. strength: fixed share that is removed, where the variant has one.
        causal: whether a token sees only itself and earlier ones, unless a prefix mask says otherwise.
        rope_base: base of the rotary embedding, None for no positions.
        rotary_dim: channels of a head that are rotated, all by default.
        bias: biases in both projections.
        qk_norm: RMSNorm of queries and keys over D, with gains.
        n_sinks: learned keys and values that every query may attend, besides the tokens. They have no
            position.
        output_gate: module `B T C -> ` anything that broadcasts to `B T H D`; multiplies the heads after
            exclusion.
        dropout: on attention weights, in training.
        backend: see `exclusive_attention`.

    Raises:
        ValueError: sizes that do not fit.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        variant: str = "xsa",
        strength: float = 1.0,
        causal: bool = False,
        rope_base: float | None = None,
        rotary_dim: int | None = None,
        bias: bool = False,
        qk_norm: bool = False,
        n_sinks: int = 0,
        output_gate: nn.Module | None = None,
        dropout: float = 0.0,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        check_sizes(d_model=d_model, n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=head_dim)
        check_sinks_and_dropout(n_sinks, dropout)
        check_backend_name(backend)
        if head_dim is None and d_model % n_heads:
            raise ValueError(
                f"d_model {d_model} is not a multiple of n_heads {n_heads}: change one or give head_dim"
            )
        self.n_heads = n_heads
        self.n_kv_heads = n_kv_heads or n_heads
        self.head_dim = head_dim or d_model // n_heads
        if n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads {n_heads} is not a multiple of n_kv_heads {self.n_kv_heads}")
        if rope_base is None and rotary_dim is not None:
            raise ValueError("rotary_dim needs rope_base: give a base, or leave rotary_dim out")
        check_rope_base(rope_base)
        rotary_dim = self.head_dim if rotary_dim is None else rotary_dim
        if rope_base is not None and (rotary_dim % 2 or not 0 < rotary_dim <= self.head_dim):
            raise ValueError(
                f"rotary_dim must be even and at most head_dim {self.head_dim}, got {rotary_dim}"
            )
        self.causal, self.rope_base, self.rotary_dim = causal, rope_base, rotary_dim
        self.dropout, self.backend, self.variant_name = dropout, backend, variant

        self.qkv = nn.Linear(d_model, sum(self._widths()), bias=bias)
        self.out = nn.Linear(n_heads * self.head_dim, d_model, bias=bias)
        self.q_norm = nn.RMSNorm(self.head_dim) if qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_dim) if qk_norm else None
        self.sink_k = self.sink_v = None
        if n_sinks:
            self.sink_k = nn.Parameter(torch.randn(n_sinks, self.n_kv_heads, self.head_dim) * 0.02)
            self.sink_v = nn.Parameter(torch.randn(n_sinks, self.n_kv_heads, self.head_dim) * 0.02)
        self.variant = build_variant(variant, n_heads, self.head_dim, strength)
        self.output_gate = output_gate
        # Called with (q, k, v, heads, call) in every forward while set; the probe uses it.
        self.observer: Observer | None = None

    def forward(
        self,
        x: Tensor,
        *,
        rotation: Rotation | None = None,
        mask: Mask | None = None,
        positions: Tensor | None = None,
        cache: LayerCache | None = None,
        value_embedding: Tensor | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            x: `B T C`.
            rotation: the rotation of these positions when the caller shares one between layers.
            mask: who may attend whom, over all S keys; a causal layer joins it with the causal rule, unless
                it has a prefix.
            positions: `T` or `B T` int64, used when `rotation` is None; by default they follow the cache.
            cache: earlier keys and values; the new ones are appended. After an error it is as it was.
            value_embedding: `B T Hkv D`, added to the values.

        Returns:
            `B T C`.

        Raises:
            ValueError: shapes that do not fit; see also `exclusive_attention` and `LayerCache.append`.
        """
        if x.ndim != 3 or x.shape[-1] != self.qkv.in_features:
            raise ValueError(f"expected x (B, T, C) = (B, T, {self.qkv.in_features}), got {tuple(x.shape)}")
        with contextlib.nullcontext() if cache is None else unchanged_on_error(cache):
            return self._forward(x, rotation, mask, positions, cache, value_embedding)

    def _forward(
        self,
        x: Tensor,
        rotation: Rotation | None,
        mask: Mask | None,
        positions: Tensor | None,
        cache: LayerCache | None,
        value_embedding: Tensor | None,
    ) -> Tensor:
        q, k, v = self._project(x, value_embedding)
        if self.rope_base is not None:
            if rotation is None:
                if positions is None:
                    positions = default_positions(
                        x.shape[1], cache.length if cache is not None else 0, x.device
                    )
                else:
                    check_positions(positions, *x.shape[:2])
                rotation = Rotation(positions, self.rotary_dim, self.rope_base, q.dtype)
            q, k = self._rotate(q, k, rotation)
        own_v = v
        if cache is not None:
            k, v = cache.append(k, v)
        call = self._call(mask)
        heads = self.variant(q, k, v, own_v, call)  # B T H D
        if self.observer is not None:
            self.observer(q, k, v, heads, self.variant.prepare(call))
        if self.output_gate is not None:
            heads = heads * self.output_gate(x).to(heads.dtype)
        return self.out(heads.flatten(2))  # B T H D -> B T H*D -> B T C

    def declared_roles(self) -> dict[str, ParameterRole]:
        """Roles that the classes of the parts do not tell."""
        roles = {"qkv.weight": ParameterRole(Role.HIDDEN_MATRIX, splits=self._widths())}
        if self.sink_k is not None:
            roles |= {name: ParameterRole(Role.SINK) for name in ("sink_k", "sink_v")}
        return roles

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        heads = f"{self.n_heads}/{self.n_kv_heads} x {self.head_dim}"
        return f"variant={self.variant_name}, heads={heads}, causal={self.causal}"

    def _widths(self) -> tuple[int, int, int]:
        kv = self.n_kv_heads * self.head_dim
        return self.n_heads * self.head_dim, kv, kv

    def _project(self, x: Tensor, value_embedding: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries `B T H D`, keys and values `B T Hkv D`: views of one projection."""
        qkv = self.qkv(x).unflatten(-1, (-1, self.head_dim))  # B T C -> B T H+2Hkv D
        q, k, v = qkv.split((self.n_heads, self.n_kv_heads, self.n_kv_heads), dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        if value_embedding is not None:
            if not broadcasts(value_embedding.shape, v.shape):
                raise ValueError(
                    f"value_embedding must be (B, T, Hkv, D) = {tuple(v.shape)}, got "
                    f"{tuple(value_embedding.shape)}"
                )
            v = v + value_embedding.to(v.dtype)
        return q, k, v

    def _rotate(self, q: Tensor, k: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        return rotation(q), rotation(k)

    def _call(self, mask: Mask | None) -> Call:
        if mask is not None:
            mask = resolve_mask(False, mask)
        sinks = None
        if self.sink_k is not None and self.sink_v is not None:
            sinks = (self.sink_k, self.sink_v)
        return Call(
            causal=self.causal and (mask is None or mask.prefix_lengths is None),
            mask=mask,
            sinks=sinks,
            dropout_p=self.dropout if self.training else 0.0,
            backend=self.backend,
        )


def check_sizes(**sizes: int | None) -> None:
    """Refuse sizes that are not whole numbers above 0; None is a default.

    Raises:
        ValueError: with the name of the first one.
    """
    for name, size in sizes.items():
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise ValueError(f"{name} must be a positive integer, got {size!r}")


def check_rope_base(rope_base: float | None) -> None:
    """Refuse a base without a power.

    Raises:
        ValueError: not a finite number above 0, nor None.
    """
    if rope_base is not None and not (is_number(rope_base) and rope_base > 0):
        raise ValueError(f"rope_base must be a positive number (or None: no positions), got {rope_base!r}")


def check_sinks_and_dropout(n_sinks: int, dropout: float, name: str = "dropout") -> None:
    """Refuse a number of sinks or a dropout of attention weights that cannot be, or not together.

    Raises:
        ValueError: says which, and what to do.
    """
    if not isinstance(n_sinks, int) or isinstance(n_sinks, bool) or n_sinks < 0:
        raise ValueError(f"n_sinks must be an integer of 0 or more, got {n_sinks!r}")
    if not is_number(dropout) or not 0 <= dropout < 1:
        raise ValueError(f"{name} must be in [0, 1), got {dropout!r}")
    if n_sinks and dropout:
        raise ValueError(f"{name} cannot be combined with n_sinks: set one of them to 0")


def select_layers(layers: str | Sequence[int], n_layers: int) -> frozenset[int]:
    """Indices of the layers a variant acts in.

    Args:
        layers: "all", "none", "first:k", "last:k", or indices (negative ones count from the end).
        n_layers: layers there are.

    Raises:
        ValueError: none of these, or more layers than there are.
    """
    expected = 'expected "all", "none", "first:k", "last:k" or a list of layer indices'
    if not isinstance(layers, str):
        chosen = list(layers) if isinstance(layers, Iterable) else [None]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in chosen):
            raise ValueError(f"layers {layers!r} not understood: {expected}")
        wrong = [i for i in chosen if not -n_layers <= i < n_layers]
        if wrong:
            raise ValueError(f"layers {wrong} are not there: the model has layers 0 to {n_layers - 1}")
        return frozenset(i % n_layers for i in chosen)
    if layers in ("all", "none"):
        return frozenset(range(n_layers if layers == "all" else 0))
    side, _, number = layers.partition(":")
    if side not in ("first", "last") or not number.isdigit():
        raise ValueError(f"layers {layers!r} not understood: {expected}")
    k = int(number)
    if k > n_layers:
        raise ValueError(f"layers {layers!r} asks for {k} of {n_layers} layers")
    return frozenset(range(k) if side == "first" else range(n_layers - k, n_layers))
