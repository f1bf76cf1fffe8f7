"""The statistics of the paper's Figure 1, for any model built from `SelfAttention`.

Axes: B batch, T tokens, H query heads, Hkv value heads, D channels of a head.

Per layer and head, with `y` the attention output *before* anything is removed from it:

    cosine_output_value   mean over tokens of cos(y_i, v_i): the bias of attention towards the own value
    diagonal_weight       mean over tokens of a_ii, the weight a token gives itself
    cosine_values         mean over pairs i != j of one sequence of cos(v_i, v_j): what values have in common

None of them forms a `T x T` tensor here: `a_ii` is one logit against the log-sum-exp, and the sum of all
pairs is the squared length of the sum of unit vectors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from xsa_core.attention.functional import attention_with_lse
from xsa_core.attention.masks import Mask, resolve_mask
from xsa_core.attention.module import SelfAttention
from xsa_core.attention.projection import accumulation_dtype, unit_and_inverse_norm
from xsa_core.attention.variants import Call
from xsa_core.modes import evaluation


@dataclass(frozen=True)
class LayerStatistics:
    """Figure 1 for one layer: a number per head, and the counts behind it.

    Attributes:
        layer: place among the model's attention layers.
        name: module path.
        variant: of the layer.
        cosine_output_value, diagonal_weight, cosine_values: `H` (the last `Hkv`) means over tokens (pairs).
        cosine_head_value: `H`, mean cosine of what the layer passes on, after the variant, and the own value:
            0 for XSA. Where nothing but rounding is left (a token that sees only itself), the length is
            taken as sqrt(eps) of y's, so that noise has no direction.
        tokens, pairs: how many tokens and pairs of tokens were seen.
    """

    layer: int
    name: str
    variant: str
    cosine_output_value: tuple[float, ...]
    diagonal_weight: tuple[float, ...]
    cosine_values: tuple[float, ...]
    cosine_head_value: tuple[float, ...]
    tokens: int
    pairs: int

    def means(self) -> dict[str, float]:
        """Means over heads, by the names of the attributes."""
        names = ("cosine_output_value", "diagonal_weight", "cosine_values", "cosine_head_value")
        return {name: sum(getattr(self, name)) / len(getattr(self, name)) for name in names}


class _Sums:
    """Running sums of one layer in float64."""

    def __init__(self) -> None:
        self.per_token: Tensor | None = None  # 3 H
        self.per_pair: Tensor | None = None  # Hkv
        self.tokens = 0
        self.pairs = 0

    def add(self, per_token: Tensor, tokens: int, per_pair: Tensor, pairs: int) -> None:
        self.per_token = per_token if self.per_token is None else self.per_token + per_token
        self.per_pair = per_pair if self.per_pair is None else self.per_pair + per_pair
        self.tokens += tokens
        self.pairs += pairs

    def result(self, layer: int, name: str, variant: str) -> LayerStatistics | None:
        if self.per_token is None or self.per_pair is None:
            return None
        cosine, diagonal, passed = (self.per_token / max(1, self.tokens)).tolist()
        return LayerStatistics(
            layer=layer,
            name=name,
            variant=variant,
            cosine_output_value=tuple(cosine),
            diagonal_weight=tuple(diagonal),
            cosine_values=tuple((self.per_pair / max(1, self.pairs)).tolist()),
            cosine_head_value=tuple(passed),
            tokens=self.tokens,
            pairs=self.pairs,
        )


def probe(model: nn.Module, batch: Any, *, valid: Tensor | None = None) -> list[LayerStatistics]:
    """Figure 1 statistics of a model on one batch.

    Args:
        model: anything with `SelfAttention` layers inside; its mode and weights are left as they are. For
            text, a batch of whole windows: statistics depend on the length.
        batch: a tensor or tuple (positional arguments) or a mapping (keyword arguments) for the model.
        valid: `B T` bool, tokens that count. By default those that the layer's mask does not call padding.

    Returns:
        One entry per attention layer that ran, in the order of the model.

    Raises:
        ValueError: the model has no such layer.
    """
    return probe_batches(model, [batch], valid=[valid])


def probe_batches(
    model: nn.Module, batches: Iterable[Any], *, valid: Iterable[Tensor | None] | None = None
) -> list[LayerStatistics]:
    """`probe` over several batches, weighted by their tokens."""
    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, SelfAttention)]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no SelfAttention layer to probe")
    sums = [_Sums() for _ in layers]
    counts = iter(valid) if valid is not None else None
    with evaluation(model):
        for batch in batches:
            chosen = next(counts) if counts is not None else None
            with torch.no_grad(), _observed([m for _, m in layers], sums, chosen):
                _run(model, batch)
    results = (s.result(i, n, m.variant_name) for i, (s, (n, m)) in enumerate(zip(sums, layers, strict=True)))
    return [r for r in results if r is not None]


def token_statistics(
    q: Tensor, k: Tensor, v: Tensor, heads: Tensor, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    """Per token and head: cos(y, v), a_ii, cos(heads, v), each `B T H` in float32 (float64 for float64
    inputs).

    Args:
        q: `B T H D`. k, v: `B T Hkv D`. heads: `B T H D`, what the variant made of it. call: as attention
            was called.
    """
    wide = accumulation_dtype(q.dtype)
    noise = torch.finfo(heads.dtype).eps ** 0.5
    q, k, v, heads = (x.to(wide) for x in (q, k, v, heads))
    groups = q.shape[2] // k.shape[2]
    scale = q.shape[-1] ** -0.5 if call.scale is None else call.scale
    mask = resolve_mask(call.causal, call.mask)
    y, lse = attention_with_lse(q, k, v, mask=mask, bias=call.bias, scale=scale)
    logit = scale * (q.unflatten(2, (-1, groups)) * k.unsqueeze(3)).sum(-1).flatten(2)  # B T H
    if call.bias is not None:
        full = call.bias.to(wide).expand(q.shape[0], q.shape[2], q.shape[1], k.shape[1])  # B H T T
        logit = logit + torch.diagonal(full, dim1=-2, dim2=-1).transpose(1, 2)  # B H T -> B T H
    lse = lse.transpose(1, 2)  # B H T -> B T H
    if call.sinks is not None:
        y, lse = _with_sinks(q, y, lse, call.sinks, scale, groups)
    # A token that sees nothing has lse -inf, and its own logit is -inf too: it gives itself no weight.
    diagonal = torch.exp(logit - lse.masked_fill(lse == -torch.inf, 0.0))
    if mask.exclude_self:
        diagonal = torch.where(_sees_nothing_else(k, mask)[..., None], diagonal, 0.0)
    own = unit_and_inverse_norm(v)[0].repeat_interleave(groups, dim=2)
    size = y.norm(dim=-1)
    return (
        _cosine(y, own, size),
        diagonal,
        _cosine(heads, own, torch.maximum(heads.norm(dim=-1), noise * size)),
    )


def pair_cosines(v: Tensor, valid: Tensor | None = None) -> tuple[Tensor, int]:
    """Sum over ordered pairs i != j of cos(v_i, v_j), and the number of pairs.

    Args:
        v: `B T Hkv D`. valid: `B T` bool, tokens that count; all by default.

    Returns:
        `Hkv` in float64 (summed over the batch, pairs within one sequence only) and how many pairs that is
        per head.
    """
    unit = unit_and_inverse_norm(v)[0].double()
    if valid is not None:
        unit = unit * valid[..., None, None]
        tokens = valid.sum(dim=1)
    else:
        tokens = torch.full((v.shape[0],), v.shape[1])
    # |sum_i u_i|^2 counts every ordered pair and every token with itself.
    total = unit.sum(dim=1).square().sum(dim=-1) - unit.square().sum(dim=(1, 3))  # B Hkv
    return total.sum(dim=0), int((tokens * (tokens - 1)).sum())


def _with_sinks(
    q: Tensor, y: Tensor, lse: Tensor, sinks: tuple[Tensor, Tensor], scale: float, groups: int
) -> tuple[Tensor, Tensor]:
    """Attention over tokens merged with that over sinks. `B T H D`, `B T H` -> the same."""
    sink_k, sink_v = (s.to(q.dtype).repeat_interleave(groups, dim=1) for s in sinks)  # N H D
    logits = scale * torch.einsum("bthd,nhd->bthn", q, sink_k)
    merged = torch.logsumexp(torch.cat((lse[..., None], logits), dim=-1), dim=-1)
    weights = torch.exp(logits - merged[..., None])
    y = y * torch.exp(lse - merged)[..., None] + torch.einsum("bthn,nhd->bthd", weights, sink_v)
    return y, merged


def _sees_nothing_else(k: Tensor, mask: Mask) -> Tensor:
    """`B T` bool: tokens that see only themselves.

    With equal logits the log-sum-exp is the log of how many a token sees.
    """
    zero = torch.zeros_like(k[:, :, :1, :])
    _, lse = attention_with_lse(zero, zero, zero, mask=replace(mask, exclude_self=False))
    return lse[:, 0] < 0.5  # between log 1 and log 2


def _cosine(x: Tensor, unit: Tensor, size: Tensor) -> Tensor:
    """Cosine of x, of the given size, and a unit vector over the last axis; 0 where either is zero."""
    return (x * unit).sum(dim=-1) / torch.where(size > 0, size, torch.ones_like(size))


@contextmanager
def _observed(layers: list[SelfAttention], sums: list[_Sums], valid: Tensor | None) -> Iterator[None]:
    """While open, every forward of the layers adds to their sums."""

    def observer(total: _Sums):
        def observe(q: Tensor, k: Tensor, v: Tensor, heads: Tensor, call: Call) -> None:
            if k.shape[1] != q.shape[1]:
                raise ValueError("probe needs whole sequences: run the model without a key-value cache")
            counted = valid
            if counted is None and call.mask is not None:
                counted = call.mask.key_padding
            tokens = torch.stack(token_statistics(q, k, v, heads, call)).double()  # 3 B T H
            if counted is not None:
                counted = counted.to(tokens.device).expand(q.shape[:2])
                tokens = tokens * counted[..., None]
            number = q.shape[0] * q.shape[1] if counted is None else int(counted.sum())
            total.add(tokens.sum(dim=(1, 2)).cpu(), number, *(_to_cpu(x) for x in pair_cosines(v, counted)))

        return observe

    previous = [layer.observer for layer in layers]
    try:
        for layer, total in zip(layers, sums, strict=True):
            layer.observer = observer(total)
        yield
    finally:
        for layer, old in zip(layers, previous, strict=True):
            layer.observer = old


def _to_cpu(x: Any) -> Any:
    return x.cpu() if isinstance(x, Tensor) else x


def _run(model: nn.Module, batch: Any) -> None:
    if isinstance(batch, Mapping):
        model(**batch)
    elif isinstance(batch, tuple | list):
        model(*batch)
    else:
        model(batch)
