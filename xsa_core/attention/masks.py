"""One description of what a query may attend, lowered by each backend to what its kernel takes.

Positions are those of the keys, 0 .. S-1. The T queries are the *last* T of them (bottom-right alignment),
so the query at row ``i`` sits at position ``i + S - T``: with a KV cache the new tokens come last.

    B batch    T queries    S keys    H heads
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from numbers import Integral

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Mask:
    """A conjunction of visibility rules; build one with the class methods and join them with ``&``.

    Tensors are copied by the class methods: what backends keep for a mask stays true, whatever becomes of the
    tensors it was made from.

    A query always sees its own position where it has one (T = S, or a rule that speaks of positions),
    whatever the other rules say: a padded token is left with itself instead of with nothing. ``exclude_self``
    is the one exception: then a token sees itself only when nothing else is visible to it.

    Attributes:
        causal_rule: keys after the query are hidden, except those inside ``prefix_lengths``.
        prefix_lengths: (B,) int tensor or an int; the first so many keys are visible to every query.
        key_padding: (B, S) bool, True = real token; padded keys are hidden.
        window_size: keys at distance >= window_size from the query are hidden (on either side).
        document_ids: tuple of (B, S) or (S,) int tensors; keys of another document are hidden.
        exclude_self: the ``diag_masked`` control.
    """

    causal_rule: bool = False
    prefix_lengths: Tensor | int | None = None
    key_padding: Tensor | None = None
    window_size: int | None = None
    document_ids: tuple[Tensor, ...] = ()
    exclude_self: bool = False

    @classmethod
    def full(cls, *, exclude_self: bool = False) -> Mask:
        """Everything sees everything (bidirectional)."""
        return cls(exclude_self=exclude_self)

    @classmethod
    def causal(cls, *, exclude_self: bool = False) -> Mask:
        """A query sees its own position and those before it."""
        return cls(causal_rule=True, exclude_self=exclude_self)

    @classmethod
    def prefix(cls, lengths: Tensor | int) -> Mask:
        """Causal, but the first ``lengths`` keys of each sequence are visible to all its queries (prefix-LM).

        Raises:
            ValueError: if ``lengths`` is neither an int of 0 or more nor a (B,) integer tensor of such.
        """
        if isinstance(lengths, Tensor):
            good, got = lengths.dim() == 1 and _counts(lengths), _described(lengths)
            if good and _read((lengths < 0).any()):
                good, got = False, f"{lengths.tolist()}"
        else:
            good, got = _whole(lengths) and lengths >= 0, repr(lengths)
        if not good:
            raise ValueError(
                f"prefix lengths must be an int >= 0 or a (B,) integer tensor, got {got}; pass one length "
                "per sequence"
            )
        kept = lengths.clone() if isinstance(lengths, Tensor) else lengths
        return cls(causal_rule=True, prefix_lengths=kept)

    @classmethod
    def padding(cls, key_padding: Tensor) -> Mask:
        """Hide padded keys. ``key_padding`` is (B, S) bool, True = real token.

        Raises:
            ValueError: for another shape or dtype, or when a sequence has no real token at all.
        """
        if not isinstance(key_padding, Tensor) or key_padding.dim() != 2 or key_padding.dtype != torch.bool:
            raise ValueError(
                f"key padding must be a (B, S) bool tensor with True for real tokens, got "
                f"{_described(key_padding)}; compare the lengths or pad ids first"
            )
        if _read(~key_padding.any(dim=1).all()):
            raise ValueError(
                "key padding hides every token of a sequence; drop the empty sequence from the batch"
            )
        return cls(key_padding=key_padding.clone())

    @classmethod
    def window(cls, size: int) -> Mask:
        """Hide keys at distance ``size`` or more; ``window(n) & causal()`` sees n tokens, itself included.

        Raises:
            ValueError: if ``size`` is no whole number, or below 1.
        """
        if not _whole(size) or size < 1:
            raise ValueError(
                f"a window holds a whole number of tokens, at least the token itself, got size {size!r}; "
                "use 1 or more"
            )
        return cls(window_size=int(size))

    @classmethod
    def documents(cls, ids: Tensor) -> Mask:
        """Packed documents: a query sees only keys with its own id. ``ids`` is (B, S) or (S,), integer.

        Raises:
            ValueError: for another number of dimensions or a dtype that is not an integer.
        """
        if not isinstance(ids, Tensor) or ids.dim() not in (1, 2) or not _counts(ids):
            raise ValueError(
                f"document ids must be an integer tensor (B, S) or (S,), got {_described(ids)}; number the "
                "documents"
            )
        ids = ids.clone()
        return cls(document_ids=(ids if ids.dim() == 2 else ids[None],))

    def __and__(self, other: Mask) -> Mask:
        """Both rules at once."""
        if not isinstance(other, Mask):
            return NotImplemented
        return Mask(
            causal_rule=self.causal_rule or other.causal_rule,
            prefix_lengths=_joined_prefix(self, other),
            key_padding=_either(self.key_padding, other.key_padding, torch.logical_and),
            window_size=_either(self.window_size, other.window_size, min),
            document_ids=self.document_ids + other.document_ids,
            exclude_self=self.exclude_self or other.exclude_self,
        )

    @property
    def features(self) -> frozenset[str]:
        """Names of the rules in force, as the backends' capability records name them."""
        present = {
            "prefix": self.prefix_lengths is not None,
            "causal": self.causal_rule and self.prefix_lengths is None,
            "padding": self.key_padding is not None,
            "window": self.window_size is not None,
            "documents": len(self.document_ids) > 0,  # bool() of a tuple is not traced
            "exclude_self": self.exclude_self,
        }
        return frozenset(name for name, on in present.items() if on)

    @property
    def positional(self) -> bool:
        """Whether a rule speaks of positions, so that a query has a place of its own among S > T keys."""
        return bool(self.features - {"padding"})

    def simplified(self, T: int, S: int) -> Mask:
        """The same mask without rules that hide nothing for T queries and S keys.

        A single query at the end sees every key, so decoding needs no causal mask.
        """
        if self.features == {"causal"} and T == 1:
            return replace(self, causal_rule=False)
        return self

    def check(self, B: int, T: int, S: int) -> None:
        """Refuse shapes that do not fit.

        Raises:
            ValueError: if some query would have no position, or a rule's tensor has another B or S.
        """
        if self.positional and S < T:
            names = ", ".join(sorted(self.features))
            raise ValueError(
                f"mask ({names}) with {T} queries and {S} keys leaves the first {T - S} queries without a "
                "position of their own; pass at least as many keys as queries"
            )
        tensors = {"key padding": self.key_padding}
        tensors |= {f"document ids {i}": ids for i, ids in enumerate(self.document_ids)}
        for name, tensor in tensors.items():
            if tensor is not None and (tensor.shape[1] != S or tensor.shape[0] not in (1, B)):
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}, but attention has batch {B} and {S} keys; "
                    "cover every key, those in the cache included"
                )
        if isinstance(self.prefix_lengths, Tensor) and self.prefix_lengths.shape[0] not in (1, B):
            raise ValueError(
                f"prefix lengths are for a batch of {self.prefix_lengths.shape[0]}, but the batch is {B}; "
                "pass one length per sequence"
            )

    def to_dense(self, B: int, T: int, S: int, device: torch.device | str) -> Tensor:
        """Visibility as a bool tensor (B or 1, 1, T, S), True = visible.

        Raises:
            ValueError: see :meth:`check`.
        """
        self.check(B, T, S)
        key = torch.arange(S, device=device)  # (S,)
        query = torch.arange(T, device=device) + (S - T)  # (T,)
        distance = query[:, None] - key[None, :]  # (T, S)
        visible = torch.ones(1, T, S, dtype=torch.bool, device=device)
        if self.causal_rule:
            visible = visible & (distance >= 0)
        if self.prefix_lengths is not None:
            lengths = torch.as_tensor(self.prefix_lengths, device=device).reshape(-1, 1, 1)  # (B|1, 1, 1)
            visible = visible | (key[None, None, :] < lengths)
        if self.window_size is not None:
            visible = visible & (distance.abs() < self.window_size)
        for ids in self.document_ids:
            ids = ids.to(device)
            visible = visible & (ids[:, S - T :, None] == ids[:, None, :])  # (B|1, T, S)
        if self.key_padding is not None:
            visible = visible & self.key_padding.to(device)[:, None, :]
        if self.exclude_self:
            others = visible & (distance != 0)
            alone = ~others.any(dim=-1, keepdim=True)  # (B|1, T, 1)
            visible = others | (alone & (distance == 0))
        elif T == S or self.positional:
            visible = visible | (distance == 0)
        return visible[:, None]  # (B|1, 1, T, S)

    def to_bias(self, B: int, T: int, S: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """The mask as an additive bias (B or 1, 1, T, S): 0 where visible, -inf where not."""
        visible = self.to_dense(B, T, S, device)
        return torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, float("-inf"))


def _counts(x: Tensor) -> bool:
    """Whether the dtype is an integer one; bool is not."""
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def _whole(x: object) -> bool:
    """Whether a number is an integer: Python's, numpy's, or a traced one; bool is not."""
    return isinstance(x, (Integral, torch.SymInt)) and not isinstance(x, bool)


def _read(fault: Tensor) -> bool:
    """The answer of a check on data; False where data cannot be read, in a traced graph or under vmap."""
    if torch.compiler.is_compiling() or fault.is_meta:
        return False
    try:
        return bool(fault)
    except RuntimeError:
        if torch._C._are_functorch_transforms_active():
            return False
        raise


def _described(x: object) -> str:
    return f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"


def _either(a, b, join):
    """``join(a, b)`` when both are there, else the one that is."""
    if a is None or b is None:
        return a if b is None else b
    return join(a, b)


def _joined_prefix(a: Mask, b: Mask) -> Tensor | int | None:
    """Prefix of the conjunction: a plain causal rule on one side closes the other side's prefix."""
    strict = any(m.causal_rule and m.prefix_lengths is None for m in (a, b))
    if strict:
        return None
    if a.prefix_lengths is None or b.prefix_lengths is None:
        return b.prefix_lengths if a.prefix_lengths is None else a.prefix_lengths
    return torch.minimum(torch.as_tensor(a.prefix_lengths), torch.as_tensor(b.prefix_lengths)).reshape(-1)


def resolve_mask(causal: bool, mask: Mask | None) -> Mask:
    """The one mask meant by the two arguments of the public functions.

    Raises:
        ValueError: if ``mask`` is something else than a :class:`Mask`.
    """
    if mask is None:
        return Mask(causal_rule=causal)
    if not isinstance(mask, Mask):
        raise ValueError(
            f"mask must be an xsa_core Mask, got {type(mask).__name__}; for key padding use "
            "Mask.padding(real_tokens), for an additive tensor use bias="
        )
    strict = mask.causal_rule and mask.prefix_lengths is None  # the same object keeps what is kept for it
    return mask & Mask.causal() if causal and not strict else mask
