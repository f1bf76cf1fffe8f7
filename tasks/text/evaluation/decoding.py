"""Continuations of many prompts at once, up to stop strings, with a key-value cache.

Unlike `GPT.generate`, which ends a row at a token, this ends it at a text, drops finished rows from the batch
and draws each row from a generator of its own, so that a result does not depend on what else is in the batch.

Axes: B rows, T tokens read in one pass, S columns of the cache, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tasks.text.trained import Trained
from xsa_core import Mask
from xsa_core.generation import sample_token

UTF8_TAIL = 4  # tokens more to look at: a character may be split into as many


@dataclass(frozen=True)
class Options:
    """How to continue: at most `max_new` tokens, up to a stop string; temperature 0 takes the likeliest."""

    max_new: int
    until: tuple[str, ...] = ()
    temperature: float = 0.0
    top_k: int | None = None


@dataclass(eq=False)
class _Row:
    """One prompt on its way: `ids` is what was read and written, the last `new` of them written."""

    place: int
    ids: list[int]
    generator: torch.Generator
    new: int = 0


@dataclass
class _Window:
    """What the model has read of the rows at hand: S columns, row b's real ones from `first[b]` on."""

    cache: object
    first: Tensor  # B
    width: int = field(default=0)


def room(limit: int, max_new: int) -> int:
    """Return how many tokens of a prompt are read by a model of `limit` positions.

    All that leave room for the answer, as in lm-evaluation-harness; at least half the window, where the
    harness refuses: the window then slides while the answer is written.
    """
    return max(1, limit // 2, limit - max_new)


@torch.inference_mode()
def continue_prompts(
    trained: Trained, prompts: Sequence[Sequence[int]], options: Options, seeds: Sequence[int]
) -> list[str]:
    """Return the text each prompt is continued with, cut before the first stop string and at an end of text.

    Args:
        trained: the model, in evaluation mode.
        prompts: token ids, at least one each; of long ones the end is read (see `room`).
        options: the same for all prompts.
        seeds: one per prompt, used where the temperature is not 0.
    """
    device = trained.model.embedding.weight.device
    keep = room(trained.model.config.max_seq_len, options.max_new)
    rows = [
        _Row(place, list(prompt)[-keep:], torch.Generator(device).manual_seed(seed))
        for place, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
    ]
    texts = [""] * len(rows)
    window: _Window | None = None
    while rows and options.max_new > 0:
        logits, window = _read(trained, rows, window, options.max_new)
        done = []
        for row, token in zip(rows, _choose(logits, rows, options), strict=True):
            ended = token == trained.end_of_text
            if not ended:
                row.ids.append(token)
                row.new += 1
            done.append(ended or row.new == options.max_new or _stopped(trained, row, options.until))
        for row in (row for row, over in zip(rows, done, strict=True) if over):
            texts[row.place] = before(trained.decode(row.ids[len(row.ids) - row.new :]), options.until)
        if any(done):
            left = [b for b, over in enumerate(done) if not over]
            rows = [rows[b] for b in left]
            chosen = torch.tensor(left, dtype=torch.int64, device=device)
            window.cache.reorder(chosen)
            window.first = window.first[chosen]
    return texts


def before(text: str, until: Sequence[str]) -> str:
    """Return the text before the first occurrence of any stop string; empty stop strings stop nothing."""
    places = [text.find(stop) for stop in until if stop]
    return text[: min((place for place in places if place >= 0), default=len(text))]


def _stopped(trained: Trained, row: _Row, until: Sequence[str]) -> bool:
    """Whether a stop string has just been completed: a token is at least a byte, so the tail is enough."""
    if not any(until):
        return False
    longest = max(len(stop.encode()) for stop in until) + UTF8_TAIL
    text = trained.decode(row.ids[len(row.ids) - min(row.new, longest) :])
    return any(stop in text for stop in until if stop)


def _choose(logits: Tensor, rows: Sequence[_Row], options: Options) -> list[int]:
    """One token per row of the logits `B V`."""
    if options.temperature == 0:
        return sample_token(logits, 0, None, None)[:, 0].tolist()
    return [
        int(sample_token(logits[b : b + 1], options.temperature, options.top_k, row.generator))
        for b, row in enumerate(rows)
    ]


def _read(
    trained: Trained, rows: Sequence[_Row], window: _Window | None, max_new: int
) -> tuple[Tensor, _Window]:
    """Logits `B V` of the next token; reads the last token, or, where the window is full, half of it anew."""
    model = trained.model
    device, limit = model.embedding.weight.device, model.config.max_seq_len
    if window is None or window.width + 1 > limit:
        # What was just read for the first time is within the limit; a full window goes on with its half.
        most = limit if window is None else max(1, limit // 2)
        parts = [row.ids[-most:] for row in rows]
        T = max(map(len, parts))
        first = torch.tensor([T - len(part) for part in parts], device=device)
        tokens = torch.tensor([[0] * (T - len(part)) + part for part in parts], device=device)  # B T
        left = max_new - min(row.new for row in rows)
        window = _Window(model.make_cache(min(limit, T + left)), first, 0)
    else:
        tokens = torch.tensor([[row.ids[-1]] for row in rows], device=device)  # B 1
        first = window.first
    end = window.width + tokens.shape[1]
    mask = positions = None
    if bool((first > 0).any()):
        columns = torch.arange(end, device=device)
        mask = Mask.padding(columns >= first[:, None])  # B S
        positions = (columns[window.width :] - first[:, None]).clamp(min=0)  # B T
    logits = model(tokens, mask=mask, positions=positions, cache=window.cache, last_only=True)[:, -1]
    window.width = end
    return logits[:, : trained.tokenizer.vocab_size], window
