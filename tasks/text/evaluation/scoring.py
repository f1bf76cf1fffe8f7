"""Log-likelihoods of continuations, many at a time: equal work is done once, padding is kept small.

Three things make this faster than one request after another, none of them changes a number: a context that
several continuations share is read once and its keys and values are reused; requests are batched by length;
logits are formed at the continuation's tokens only.

Axes: B rows, T tokens of a row, P prefix tokens, N continuations, R positions whose logits are wanted,
M targets, C width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tasks.errors import UserError
from tasks.text.evaluation.batching import (
    Family,
    Piece,
    batch_digest,
    cut,
    family_batches,
    single_batches,
    split_families,
)
from tasks.text.evaluation.journal import Journal
from xsa_core import GPT, KVCache, Mask

LOGIT_ELEMENTS = 1 << 24  # logits held at a time: 64 MB in float32
CPU_BUDGET = 1024  # positions of a batch; more leaves the caches of a CPU (measured: 2048 is 10% slower)
GPU_BUDGET = 1 << 16

Advance = Callable[[int, int], None]  # done, total


@dataclass(frozen=True)
class Score:
    """Log-probability of a continuation in nats, and whether greedy decoding would have written it."""

    logprob: float
    greedy: bool


@dataclass
class Counts:
    """What had to be cut: contexts longer than the model, continuations longer than the model."""

    requests: int = 0
    cut_contexts: int = 0
    split_continuations: int = 0


class Scorer:
    """Scores of continuations under one model.

    Args:
        model: the decoder, on its device; it is used in evaluation mode.
        budget: positions of a batch, by default by device. A GPU that runs out of memory halves it.
        share_contexts: read a context once for all its continuations.
        journal: keeps every batch's scores, and has those of an evaluation that was stopped. Batches are
            those of all requests, whatever is kept, so that going on rounds as going through does.
    """

    def __init__(
        self,
        model: GPT,
        budget: int | None = None,
        *,
        share_contexts: bool = True,
        journal: Journal | None = None,
    ) -> None:
        self.model = model
        self.share_contexts = share_contexts
        self.limit = model.config.max_seq_len
        self.device = model.embedding.weight.device
        self.budget = budget or (CPU_BUDGET if self.device.type == "cpu" else GPU_BUDGET)
        self.counts = Counts()
        self.journal = journal or Journal()

    def __call__(
        self,
        requests: Sequence[tuple[Sequence[int], Sequence[int]]],
        advance: Advance = lambda done, total: None,
    ) -> list[Score]:
        """Score every (context, continuation), both as token ids, in the order given.

        Of a context and continuation of more than `max_seq_len` + 1 tokens together the left end is cut, as
        lm-evaluation-harness does. Where the continuation alone is longer than `max_seq_len` (the harness
        refuses that), it is scored in blocks of half of it, each with all the context that fits. `advance` is
        told how many different pieces are done, and of how many. An empty continuation has probability one.

        Raises:
            ValueError: an empty context.
        """
        pieces: dict[Piece, int] = {}
        parts = []
        for context, continuation in requests:
            found = cut(context, continuation, self.limit)
            parts.append([pieces.setdefault(piece, len(pieces)) for piece in found])
            self.counts.requests += 1
            self.counts.split_continuations += len(found) > 1
            self.counts.cut_contexts += len(context) + len(continuation) > self.limit + 1
        scores = self._score(list(pieces), advance)
        return [
            Score(sum(scores[i].logprob for i in part), all(scores[i].greedy for i in part)) for part in parts
        ]

    @torch.inference_mode()
    def _score(self, pieces: Sequence[Piece], advance: Advance) -> list[Score]:
        scores: dict[Piece, Score] = {}
        families, singles = split_families(pieces) if self.share_contexts else ([], list(pieces))
        was_training = self.model.training
        self.model.eval()
        try:
            # Family by family first: their batches are the large ones, so that memory falls short early.
            self._work(families, family_batches, self._families, scores, len(pieces), advance)
            self._work(singles, single_batches, self._singles, scores, len(pieces), advance)
        finally:
            self.model.train(was_training)
        return [scores[piece] for piece in pieces]

    def _work(self, items, batches, run, scores: dict[Piece, Score], total: int, advance: Advance) -> None:
        """Run all batches; one that does not fit into the GPU's memory is made smaller, and all after it."""
        waiting = batches(items, self.budget, self.limit)
        while waiting:
            batch = waiting.pop(0)
            try:
                scores |= self._recalled(batch, run)
            except torch.OutOfMemoryError:
                if len(batch) == 1:
                    raise UserError(
                        "evaluation: out of memory with a single request; use a device with more, "
                        "or the CPU (--device cpu)"
                    ) from None
                torch.cuda.empty_cache()
                self.budget = max(1, self.budget // 2)
                rest = [item for later in (batch, *waiting) for item in later]
                waiting = batches(rest, self.budget, self.limit)
                continue
            advance(len(scores), total)

    def _recalled(self, batch, run) -> dict[Piece, Score]:
        """Return a batch's scores, from the journal where it has them."""

        def compute() -> list[tuple[float, bool]]:
            found = run(batch)
            return [(found[piece].logprob, found[piece].greedy) for piece in pieces]

        pieces = [piece for item in batch for piece in item.pieces]
        kept = self.journal.recall(lambda: batch_digest(batch), compute)
        return {piece: Score(*score) for piece, score in zip(pieces, kept, strict=True)}

    def _singles(self, batch: Sequence[Piece]) -> dict[Piece, Score]:
        """Pieces with a prefix of their own: one pass over prefix and continuation."""
        tokens = self._padded([piece.inputs for piece in batch])  # B T
        hidden = self.model.hidden(tokens)  # B T C: padding stands behind, so causality hides it
        rows = [b for b, piece in enumerate(batch) for _ in piece.target]
        columns = [
            len(piece.prefix) - 1 + i for piece in batch for i in range(len(piece.target))
        ]  # the token before each target
        targets = [token for piece in batch for token in piece.target]
        wanted = hidden[self._ids(rows), self._ids(columns)]  # R C
        owners = torch.tensor(rows)
        return self._sums(batch, self._log_probs(wanted, self._ids(range(len(rows))), targets), owners)

    def _families(self, batch: Sequence[Family]) -> dict[Piece, Score]:
        """Families of pieces with one prefix: the prefixes first, then all continuations on their caches."""
        pieces = [piece for family in batch for piece in family.pieces]
        family_of = [f for f, family in enumerate(batch) for _ in family.targets]
        longer = [n for n, piece in enumerate(pieces) if len(piece.target) > 1]
        lengths = self._ids([len(family.prefix) for family in batch])
        prefixes = self._padded([family.prefix for family in batch])  # B P
        P = prefixes.shape[1]
        rest = max(len(piece.target) for piece in pieces) - 1
        cache = KVCache(self.model.config.n_layers, P + rest) if rest else None
        hidden = self.model.hidden(prefixes, cache=cache)  # B P C
        last = hidden[torch.arange(len(batch), device=self.device), lengths - 1]  # B C
        found = [self._log_probs(last, self._ids(family_of), [piece.target[0] for piece in pieces])]
        owners = [torch.arange(len(pieces))]
        if cache is not None:
            rows = self._ids([family_of[n] for n in longer])
            cache.reorder(rows)
            found.append(self._continue([pieces[n] for n in longer], cache, lengths[rows], P))
            owners.append(torch.tensor([n for n in longer for _ in pieces[n].target[1:]]))
        both = torch.cat([logs for logs, _ in found]), torch.cat([same for _, same in found])
        return self._sums(pieces, both, torch.cat(owners))

    def _continue(
        self, pieces: Sequence[Piece], cache: KVCache, lengths: Tensor, P: int
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities of all targets but the first, given the cache of the prefixes.

        Args:
            pieces: N of them, row for row those of the cache.
            lengths: `N`, real tokens of each prefix among the P columns of the cache.
        """
        tokens = self._padded([piece.target[:-1] for piece in pieces])  # N T
        T = tokens.shape[1]
        mask = None
        if bool((lengths != P).any()):
            columns = torch.arange(P + T, device=self.device)
            mask = Mask.padding((columns < lengths[:, None]) | (columns >= P))  # N P+T
        positions = lengths[:, None] + torch.arange(T, device=self.device)  # N T
        hidden = self.model.hidden(tokens, mask=mask, positions=positions, cache=cache)  # N T C
        rows = [n for n, piece in enumerate(pieces) for _ in piece.target[1:]]
        columns = [i for piece in pieces for i in range(len(piece.target) - 1)]
        targets = [token for piece in pieces for token in piece.target[1:]]
        wanted = hidden[self._ids(rows), self._ids(columns)]  # R C
        return self._log_probs(wanted, self._ids(range(len(rows))), targets)

    def _log_probs(self, hidden: Tensor, rows: Tensor, targets: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Log-probability of target j at position `rows[j]`, and whether it is the likeliest token.

        Args:
            hidden: `R C`. rows: `M` int64, not decreasing.

        Returns:
            `M` float64 and `M` bool, on the CPU.
        """
        wanted = self._ids(targets)
        logs, same = [], []
        step = max(1, LOGIT_ELEMENTS // self.model.config.vocab_size)
        for start in range(0, hidden.shape[0], step):
            logits = self.model.head(hidden[start : start + step])  # r V
            logits = logits if logits.dtype == torch.float64 else logits.float()
            bounds = torch.searchsorted(rows, self._ids([start, start + step])).tolist()
            row, target = rows[slice(*bounds)] - start, wanted[slice(*bounds)]
            logs.append((logits[row, target] - logits.logsumexp(dim=-1)[row]).double().cpu())
            same.append((logits.argmax(dim=-1)[row] == target).cpu())
        return torch.cat(logs), torch.cat(same)

    def _sums(
        self, pieces: Sequence[Piece], found: tuple[Tensor, Tensor], owners: Tensor
    ) -> dict[Piece, Score]:
        """Add up tokens to pieces: `owners[j]` is the piece that token j belongs to."""
        logs, same = found
        totals = torch.zeros(len(pieces), dtype=torch.float64).index_add_(0, owners, logs)
        wrong = torch.zeros(len(pieces)).index_add_(0, owners, (~same).float())
        return {
            piece: Score(total, misses == 0)
            for piece, total, misses in zip(pieces, totals.tolist(), wrong.tolist(), strict=True)
        }

    def _padded(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Rows of ids, padded behind with token 0 to the longest: `B T`."""
        T = max(len(row) for row in rows)
        return self._ids([list(row) + [0] * (T - len(row)) for row in rows])

    def _ids(self, values: object) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=self.device)  # type: ignore[call-overload]
