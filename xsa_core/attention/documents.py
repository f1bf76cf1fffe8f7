"""Packed documents as what they are: pieces of the token axis that do not see each other.

    B batch   S positions

A kernel that runs each piece on its own skips the hidden work and gives, bit for bit, what the documents give
as sequences of their own (learned sinks, which are merged for the whole row, agree to rounding). For that the
ids are read, once for all layers that share a mask.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from xsa_core.attention.masks import Mask

# A document costs a call per head, which takes the time of about so many logits (measured in bf16, where
# calls are dearest). Where that is more than the logits of the whole row, a dense mask is faster.
CALL_LOGITS = 8192


@dataclass(frozen=True)
class Piece:
    """One document, in batch rows `rows` at positions `tokens`."""

    rows: slice
    tokens: slice


@dataclass(frozen=True)
class Packed:
    """A batch of packed documents, each attended on its own, causally or not."""

    pieces: tuple[Piece, ...]
    causal: bool


_PLANS: weakref.WeakKeyDictionary[Mask, dict[tuple[int, ...], Packed | None]] = weakref.WeakKeyDictionary()


def packed_documents(mask: Mask, B: int, T: int, S: int) -> Packed | None:
    """The pieces of a mask of documents, causal or not; None where it says more than that, where so many
    documents share a short row that a dense mask is faster, or an id returns after another one."""
    if T != S or "documents" not in mask.features or not mask.features <= {"documents", "causal"}:
        return None
    plans = _PLANS.setdefault(mask, {})  # a mask's ids are its own copy, so they do not change
    if (B, S) not in plans:
        plans[B, S] = _packed(mask, B, S)
    return plans[B, S]


def _packed(mask: Mask, B: int, S: int) -> Packed | None:
    """See :func:`packed_documents`."""
    together = torch.stack([ids.cpu().expand(B, S).long() for ids in mask.document_ids], dim=-1)  # (B, S, n)
    pieces: list[Piece] = []
    first = 0
    for row in range(1, B + 1):  # rows of one layout run together
        if row < B and torch.equal(together[row], together[first]):
            continue
        lengths = document_lengths(together[first][None])
        if lengths is None:
            return None
        start = 0
        for length in lengths:
            pieces.append(Piece(slice(first, row), slice(start, start + length)))
            start += length
        first = row
    documents = sum(piece.rows.stop - piece.rows.start for piece in pieces)
    if documents > B and documents * CALL_LOGITS > B * S * S:
        return None
    return Packed(tuple(pieces), "causal" in mask.features)


def document_lengths(ids: Tensor) -> list[int] | None:
    """Lengths of the documents of ids (B, S) or (B, S, n) laid end to end; None where one returns after
    another."""
    lengths: list[int] = []
    S = ids.shape[1]
    for row in ids.reshape(*ids.shape[:2], -1).cpu():  # (S, n)
        changes = (row[1:] != row[:-1]).any(dim=-1)
        starts = [0, *(changes.nonzero().flatten() + 1).tolist()]
        names = [tuple(name) for name in row[starts].tolist()]
        if len(set(names)) < len(names):
            return None
        lengths += [stop - start for start, stop in zip(starts, [*starts[1:], S], strict=True)]
    return lengths
