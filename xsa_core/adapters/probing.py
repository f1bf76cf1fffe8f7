"""The statistics of the paper's Figure 1 for a model of another library, as it stands or converted.

Axes: B batch, T queries, S keys, H query heads, Hkv value heads, D channels of a head.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from xsa_core.adapters.base import SELF
from xsa_core.adapters.hf.attention import EagerCall
from xsa_core.adapters.registry import Layers, convert, converted_layers, describe, revert
from xsa_core.attention.probe import LayerStatistics, _cosine, _run, _Sums, pair_cosines, token_statistics
from xsa_core.attention.projection import accumulation_dtype, unit_and_inverse_norm
from xsa_core.attention.variants import Call
from xsa_core.modes import evaluation


def probe_as_it_stands(model: nn.Module, batches: Iterable[Any]) -> list[LayerStatistics]:
    """Figure 1 of a model that is not converted, or of a converted one with what it removes.

    Plain layers are converted to plain attention (`sa`) while they are looked at, and are plain again
    afterwards, also those of a model that is converted in part.

    Args:
        model: its mode and weights are left as they are.
        batches: each a tensor or tuple (positional arguments) or a mapping (keyword arguments), without a
            key-value cache.

    Returns:
        One entry per self attention layer that ran, in the order of the model.

    Raises:
        ValueError: the model cannot be converted; see :func:`xsa_core.convert`.
    """
    there = set(converted_layers(model))
    plain = {row.path for row in describe(model) if row.kind == SELF} - there
    if there and not plain:
        return probe_converted(model, batches)
    layers: Layers = (lambda path: path in plain) if there else "all"
    convert(model, layers=layers, variant="sa")
    try:
        return probe_converted(model, batches)
    finally:
        revert(model, layers=layers)


def probe_converted(model: nn.Module, batches: Iterable[Any]) -> list[LayerStatistics]:
    """Figure 1 of a converted model: of its attention before anything is removed, and what it passes on.

    Arguments, result and errors as of :func:`probe_as_it_stands`; layers that were not converted are missing,
    and the others keep their numbers among all self attention layers.
    """
    layers = list(converted_layers(model).items())
    if not layers:
        raise ValueError(f"{type(model).__name__} has no converted layer: call xsa_core.convert(model) first")
    sums = [_Sums() for _ in layers]
    before = [exclusion.observer for _, exclusion in layers]
    try:
        for (path, exclusion), total in zip(layers, sums, strict=True):
            exclusion.observer = _observer(path, total)
        with evaluation(model), torch.no_grad():
            for batch in batches:
                _run(model, batch)
    finally:
        for (_, exclusion), observer in zip(layers, before, strict=True):
            exclusion.observer = observer
    place = {path: i for i, path in enumerate(row.path for row in describe(model) if row.kind == SELF)}
    rows = zip(layers, sums, strict=True)
    results = (total.result(place[path], path, exclusion.variant_name) for (path, exclusion), total in rows)
    return [row for row in results if row is not None]


def _observer(path: str, total: _Sums):
    def observe(q: Tensor, k: Tensor, v: Tensor, own_v: Tensor, heads: Tensor, call: Call) -> None:
        if k.shape[1] != q.shape[1]:
            raise ValueError(f"{path}: probing needs whole sequences; run the model without a cache")
        statistics = _explicit(q, k, v, heads, call) if isinstance(call, EagerCall) else None
        if statistics is None:
            statistics = token_statistics(q, k, v, heads, call)
        tokens = torch.stack(statistics).double().sum(dim=(1, 2)).cpu()  # 3 B T H -> 3 H
        pairs, number = pair_cosines(v)
        total.add(tokens, q.shape[0] * q.shape[1], pairs.cpu(), number)

    return observe


def _explicit(
    q: Tensor, k: Tensor, v: Tensor, heads: Tensor, call: EagerCall
) -> tuple[Tensor, Tensor, Tensor] | None:
    """`token_statistics` from the weights of a model's own attention, with its soft cap and its sinks.

    None where that gives no weights.
    """
    y = call.attend(q, k, v)
    weights = call.weights.pop()  # B H T S
    if weights is None:
        return None
    wide = accumulation_dtype(q.dtype)
    y, v, heads, noise = y.to(wide), v.to(wide), heads.to(wide), torch.finfo(heads.dtype).eps ** 0.5
    own = unit_and_inverse_norm(v)[0].repeat_interleave(q.shape[2] // v.shape[2], dim=2)
    size = y.norm(dim=-1)
    diagonal = torch.diagonal(weights[..., : k.shape[1]], dim1=-2, dim2=-1).transpose(1, 2).to(wide)
    return (
        _cosine(y, own, size),
        diagonal,
        _cosine(heads, own, torch.maximum(heads.norm(dim=-1), noise * size)),
    )


__all__ = ["probe_as_it_stands", "probe_converted"]
