"""What is scored together: pieces that fit the model, families that share a prefix, batches by length.

Pure functions of token ids, without torch.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """Tokens to be scored (`target`, at least one) after a prefix (at least one): what one row reads."""

    prefix: Tokens
    target: Tokens

    @property
    def inputs(self) -> Tokens:
        """What the model reads: everything but the last token, which is only predicted."""
        return self.prefix + self.target[:-1]

    @property
    def pieces(self) -> list[Piece]:
        """Itself: a family of one."""
        return [self]


@dataclass(frozen=True)
class Family:
    """Several targets after one prefix."""

    prefix: Tokens
    targets: tuple[Tokens, ...]

    @property
    def rest(self) -> int:
        """Tokens of the longest target that are read: all but its last."""
        return max(len(target) for target in self.targets) - 1

    @property
    def pieces(self) -> list[Piece]:
        """The family's pieces, in order."""
        return [Piece(self.prefix, target) for target in self.targets]


def batch_digest(batch: Sequence[Piece] | Sequence[Family]) -> str:
    """Return a hash of a batch: its tokens, their order, and which of the two ways it is computed."""
    digest = hashlib.sha256()
    for item in batch:
        targets = item.targets if isinstance(item, Family) else (item.target,)
        digest.update(type(item).__name__.encode())
        for tokens in (item.prefix, *targets):
            digest.update(len(tokens).to_bytes(8, "little") + array("q", tokens).tobytes())
    return digest.hexdigest()


def cut(context: Sequence[int], continuation: Sequence[int], limit: int) -> list[Piece]:
    """Return the pieces whose scores add up to the continuation's, none longer than `limit` tokens to read.

    One piece, cut from the left, as lm-evaluation-harness does. A continuation longer than the limit is
    scored in blocks of half of it, each after as much of all before it as fits. No piece for an empty
    continuation.

    Raises:
        ValueError: an empty context: there is nothing to predict the first token from.
    """
    if not context:
        raise ValueError("a continuation needs a context of at least one token; prepend the prefix token")
    tokens = (*context, *continuation)
    block = len(continuation) if len(continuation) <= limit else max(1, limit // 2)
    pieces = []
    for start in range(len(context), len(tokens), max(1, block)):
        end = min(start + block, len(tokens))
        first = max(0, end - limit - 1)
        pieces.append(Piece(tokens[first:start], tokens[start:end]))
    return pieces


def split_families(pieces: Sequence[Piece]) -> tuple[list[Family], list[Piece]]:
    """Return the families of pieces with a common prefix, and the pieces that share theirs with no other."""
    targets: dict[Tokens, list[Tokens]] = {}
    for piece in pieces:
        targets.setdefault(piece.prefix, []).append(piece.target)
    families = [Family(prefix, tuple(found)) for prefix, found in targets.items() if len(found) > 1]
    singles = [Piece(prefix, found[0]) for prefix, found in targets.items() if len(found) == 1]
    return families, singles


def single_batches(pieces: Sequence[Piece], budget: int, limit: int) -> list[list[Piece]]:
    """Return batches of pieces, longest first, of at most `budget` positions with padding (or one piece)."""
    batches: list[list[Piece]] = []
    longest = 0
    for piece in sorted(pieces, key=lambda piece: (-len(piece.inputs), piece.inputs)):
        # Sorted: the first of a batch is its longest.
        if not batches or (len(batches[-1]) + 1) * longest > budget:
            batches.append([])
            longest = len(piece.inputs)
        batches[-1].append(piece)
    return batches


def family_batches(families: Sequence[Family], budget: int, limit: int) -> list[list[Family]]:
    """Return batches of families, longest prefix first, that are within `budget` positions (or one family).

    Both passes count: prefixes with padding, and continuations with padding; the cache that the latter read,
    of all their prefixes, may hold four times as many. Prefix and continuation with padding stay within the
    model's `limit`, which is why a family near it may come alone.
    """
    batches: list[list[Family]] = []
    prefix = rest = rows = 0
    for family in sorted(families, key=lambda family: (-len(family.prefix), -family.rest, family.prefix)):
        wider, more = max(rest, family.rest), rows + len(family.targets)
        fits = (
            bool(batches)
            and prefix + wider <= limit
            and (len(batches[-1]) + 1) * prefix <= budget
            and more * wider <= budget
            and more * (prefix + wider) <= 4 * budget
        )
        if not fits:
            batches.append([])
            prefix, wider, more = len(family.prefix), family.rest, len(family.targets)
        batches[-1].append(family)
        rest, rows = wider, more
    return batches
