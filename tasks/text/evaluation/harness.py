"""The adapter: a decoder of this suite as a language model of lm-evaluation-harness."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from tasks.errors import UserError
from tasks.text.evaluation.decoding import Options, continue_prompts, room
from tasks.text.evaluation.journal import Journal
from tasks.text.evaluation.scoring import Counts, Scorer
from tasks.text.trained import Trained

DEFAULT_NEW_TOKENS = 256  # the harness's own
NEUTRAL = {"top_p": (1, 1.0, None), "num_beams": (1, None), "repetition_penalty": (1, 1.0, None)}
READ = {"until", "max_gen_toks", "do_sample", "temperature", "top_k"}  # of generation options
MAX_ROWS = 256  # prompts continued at once

Advance = Callable[[str, int, int], None]  # what, done, total


class HarnessModel(TemplateLM):
    """Scores and continues texts for the harness; rows of a batch never influence each other.

    Args:
        trained: the model with its tokenizer, the model on its device.
        budget: positions of a batch, by default by device (see `Scorer`).
        seed: of drawn continuations, together with the place of each request.
        advance: is told what is done, how much of it and of how much.
        journal: keeps what is computed, batch by batch (see `Scorer`).
    """

    def __init__(
        self,
        trained: Trained,
        budget: int | None = None,
        seed: int = 0,
        advance: Advance = lambda what, done, total: None,
        journal: Journal | None = None,
    ) -> None:
        super().__init__()
        self.trained = trained
        self.scorer = Scorer(trained.model, budget, journal=journal)
        self.seed = seed
        self.advance = advance
        self._device = self.scorer.device

    @property
    def counts(self) -> Counts:
        """What did not fit the model, over all calls so far."""
        return self.scorer.counts

    @property
    def max_length(self) -> int:
        """Most tokens the model reads."""
        return self.scorer.limit

    @property
    def eot_token_id(self) -> int:
        """The token that stands before a text without context: end of text, a newline for plain bytes."""
        return self.trained.prefix_token

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's name."""
        return self.trained.tokenizer.name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the ids of a text; no special token is ever added."""
        return self.trained.encode(string)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Ids of context and continuation, the boundary as the harness draws it.

        The continuation is what the encoding of both together has beyond the length of the context's own. A
        merge across the boundary may leave nothing; then the last token of both together is what is scored.
        """
        context_ids, continuation_ids = super()._encode_pair(context, continuation)
        if continuation and not continuation_ids:
            whole = self.tok_encode(context + continuation)
            context_ids, continuation_ids = whole[:-1] or [self.prefix_token_id], whole[-1:]
        return context_ids, continuation_ids

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return log-probability in nats and greedy match of every (context, continuation)."""
        pairs = []
        for context, continuation in (request.args for request in requests):
            if context:
                ids, target = self._encode_pair(context, continuation)
            else:
                ids, target = [self.prefix_token_id], self.tok_encode(continuation)
                if target[:1] == ids:  # a text that begins with the prefix token is not given a second one
                    ids, target = target[:1], target[1:]
            pairs.append(((context, continuation), ids, target))
        return self._loglikelihood_tokens(pairs)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        scores = self.scorer(
            [(context, continuation) for _, context, continuation in requests],
            lambda done, total: self.advance("requests", done, total),
        )
        answers = [(score.logprob, score.greedy) for score in scores]
        for (texts, _, _), answer in zip(requests, answers, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of every text as a whole, in windows as the harness cuts them."""
        windows: list[tuple[list[int], list[int]]] = []
        owners: list[int] = []
        for owner, (text,) in enumerate(request.args for request in requests):
            found = list(
                get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
            )
            windows += map(make_disjoint_window, found)
            owners += [owner] * len(found)
        totals = [0.0] * len(requests)
        answers = self._loglikelihood_tokens([(None, *window) for window in windows])
        for owner, (logprob, _) in zip(owners, answers, strict=True):
            totals[owner] += logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return what every context is continued with, before its first stop string."""
        answers = [""] * len(requests)
        done = 0
        for options, places in self._by_options(requests):
            prompts = {
                place: self.tok_encode(requests[place].args[0]) or [self.prefix_token_id] for place in places
            }
            for batch in self._batches(prompts, options.max_new):
                rows = [prompts[place] for place in batch]
                seeds = [self.seed + place for place in batch]
                texts = self.scorer.journal.recall(
                    partial(_digest, rows, options, seeds),
                    partial(continue_prompts, self.trained, rows, options, seeds),
                )
                for place, text in zip(batch, texts, strict=True):
                    answers[place] = text
                    self.cache_hook.add_partial("generate_until", requests[place].args, text)
                done += len(batch)
                self.advance("continuations", done, len(requests))
        return answers

    def _by_options(self, requests: Sequence[Instance]) -> list[tuple[Options, list[int]]]:
        """Places of the requests, by how they are to be continued."""
        groups: dict[str, list[int]] = {}
        for place, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(place)
        return [(generation_options(json.loads(key)), places) for key, places in groups.items()]

    def _batches(self, prompts: dict[int, list[int]], max_new: int) -> list[list[int]]:
        """Places by length of prompt, longest first, so many at once that their caches fit the budget."""
        keep = room(self.max_length, max_new)
        batches: list[list[int]] = []
        longest = 0
        for place in sorted(prompts, key=lambda place: (-len(prompts[place]), place)):
            rows = len(batches[-1]) + 1 if batches else 0
            if not batches or rows > MAX_ROWS or rows * longest > 4 * self.scorer.budget:
                batches.append([])
                longest = min(self.max_length, min(keep, len(prompts[place])) + max_new)
            batches[-1].append(place)
        return batches


def _digest(rows: Sequence[list[int]], options: Options, seeds: Sequence[int]) -> str:
    """Return a hash of everything that prompts are continued by."""
    return hashlib.sha256(repr((rows, options, seeds)).encode()).hexdigest()


def generation_options(wanted: dict[str, Any]) -> Options:
    """Return what a task's generation options ask for.

    Raises:
        UserError: an option that would change the answer and is not offered here.
    """
    options = normalize_gen_kwargs(wanted, DEFAULT_NEW_TOKENS)
    for name, value in options.items():
        if name not in READ and value not in NEUTRAL.get(name, ()):
            raise UserError(
                f"the task asks for generation with {name}={value!r}; offered are {', '.join(sorted(READ))}"
            )
    return Options(
        max_new=options["max_gen_toks"],
        until=tuple(stop for stop in options["until"] if stop),
        temperature=float(options.get("temperature", 1.0)) if options["do_sample"] else 0.0,
        top_k=options.get("top_k"),
    )
