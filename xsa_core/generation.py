"""Sampling from a decoder with its key-value cache.

Axes: B batch, T prompt tokens, N new tokens, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from xsa_core.attention.masks import Mask
from xsa_core.modes import evaluation

if TYPE_CHECKING:
    from xsa_core.gpt import GPT


@torch.no_grad()
def generate(
    model: GPT,
    tokens: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
    stop: int | None = None,
    prompt_lengths: Tensor | None = None,
) -> Tensor:
    """Continue prompts token by token.

    When `max_seq_len` is reached, the model goes on with the later half of what it has seen, re-read once;
    so the cost per token stays that of the cache. The model is in evaluation mode meanwhile.

    Args:
        model: the decoder.
        tokens: `B T` int64, T at least 1. Of a prompt longer than `max_seq_len` the model sees the end.
        max_new_tokens: N at most.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: only the k likeliest tokens are drawn from.
        generator: source of randomness, on the model's device.
        stop: a token that ends a row; the row is filled with it, and sampling ends when all rows have it.
        prompt_lengths: `B` int64 for prompts of several lengths, padded on the *left*: row b's prompt is
            its last `prompt_lengths[b]` tokens. What stands before does not matter.

    Returns:
        `B T+N`: prompts and continuations.

    Raises:
        ValueError: an empty prompt, or an option out of range.
    """
    _check(model, tokens, max_new_tokens, temperature, top_k, prompt_lengths)
    with evaluation(model):
        return _continue(model, tokens, max_new_tokens, temperature, top_k, generator, stop, prompt_lengths)


def sample_token(
    logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None
) -> Tensor:
    """One token per row, `B V -> B 1`."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    logits = logits.float() / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)


def _continue(
    model: GPT,
    tokens: Tensor,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    generator: torch.Generator | None,
    stop: int | None,
    prompt_lengths: Tensor | None,
) -> Tensor:
    limit = model.config.max_seq_len
    B, T = tokens.shape
    out = torch.cat((tokens, tokens.new_zeros(B, max_new_tokens)), dim=1)  # B T+N
    # First real token of each row, as a column of `out`.
    first = None if prompt_lengths is None else T - prompt_lengths.to(tokens.device)
    done = torch.zeros(B, 1, dtype=torch.bool, device=tokens.device)
    end, start = T, max(0, T - limit)  # the model sees columns start .. end - 1
    cache, fresh = model.make_cache(min(limit, T + max_new_tokens - start)), True
    while end < T + max_new_tokens:
        if end - start > limit:
            start, fresh = end - max(1, limit // 2), True
            cache = model.make_cache(limit)
        seen = start if fresh else end - 1
        mask, positions = _padding(first, start, seen, end)
        logits = model(out[:, seen:end], mask=mask, positions=positions, cache=cache, last_only=True)
        fresh = False
        token = sample_token(logits[:, -1], temperature, top_k, generator)
        if stop is not None:
            token = torch.where(done, stop, token)
            done |= token == stop
        out[:, end : end + 1] = token
        end += 1
        if stop is not None and bool(done.all()):
            break
    return out[:, :end]


def _padding(first: Tensor | None, start: int, seen: int, end: int) -> tuple[Mask | None, Tensor | None]:
    """For padded prompts: mask over columns `start .. end-1`, positions of the columns `seen .. end-1`."""
    if first is None or bool((first <= start).all()):
        return None, None
    columns = torch.arange(start, end, device=first.device)
    real = columns >= first[:, None]  # B S
    positions = (columns[seen - start :] - first.clamp(min=start)[:, None]).clamp(min=0)  # B T'
    return Mask.padding(real), positions


def _check(
    model: GPT,
    tokens: Tensor,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    prompt_lengths: Tensor | None,
) -> None:
    if tokens.ndim != 2 or tokens.shape[1] < 1:
        raise ValueError(
            f"a prompt of at least one token is needed, as (B, T); got shape {tuple(tokens.shape)}"
        )
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be 0 or more, got {max_new_tokens}")
    if temperature < 0:
        raise ValueError(f"temperature must be 0 (likeliest token) or more, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}")
    if prompt_lengths is not None:
        if prompt_lengths.shape != tokens.shape[:1]:
            raise ValueError(
                f"prompt_lengths must be ({tokens.shape[0]},), got {tuple(prompt_lengths.shape)}"
            )
        if bool(((prompt_lengths < 1) | (prompt_lengths > tokens.shape[1])).any()):
            raise ValueError(
                f"prompt_lengths must be between 1 and {tokens.shape[1]}, got {prompt_lengths.tolist()}"
            )
