"""Downstream evaluation: documents a second, against an adapter that scores one request after another.

Requests are multiple-choice documents as the paper's tasks have them (a context, several continuations) and
LAMBADA's (one continuation), of random tokens: what they say does not matter to the clock. Their lengths are
drawn around the means of those tasks, in bytes, or in tokens where the vocabulary is GPT-2's. (WinoGrande's
choices really differ in the context; here they share it as the others do.)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tasks.bench.timing import interleave
from tasks.text.evaluation.scoring import Score, Scorer
from xsa_core import GPT, GPTConfig, initialize

BASELINE = "one by one"
BYTES_PER_TOKEN = 4.4  # of GPT-2's tokenizer on English text
# task -> mean bytes of context and continuation, choices (zero-shot prompts of lm-evaluation-harness)
SHAPES: dict[str, tuple[int, int, int]] = {
    "arc_easy": (115, 27, 4),
    "boolq": (690, 4, 2),
    "hellaswag": (220, 95, 4),
    "lambada_openai": (325, 7, 1),
    "openbookqa": (60, 26, 4),
    "piqa": (55, 100, 2),
    "social_iqa": (130, 20, 3),
    "winogrande": (75, 40, 2),
}
Request = tuple[list[int], list[int]]


@dataclass(frozen=True)
class Work:
    """A model and the requests of `documents` documents."""

    model: GPT
    requests: list[Request]
    documents: int


def make_requests(documents: int, vocab_size: int, scale: float, seed: int = 0) -> list[Request]:
    """Return the requests of `documents` documents, evenly from all shapes, lengths divided by `scale`."""
    draw, lengths = random.Random(seed), random.Random(seed)

    def tokens(mean: float) -> list[int]:
        length = max(1, round(lengths.gauss(mean, 0.3 * mean) / scale))
        return [draw.randrange(vocab_size) for _ in range(length)]

    requests = []
    for number in range(documents):
        context, continuation, choices = list(SHAPES.values())[number % len(SHAPES)]
        shared = tokens(context)
        requests += [(shared, tokens(continuation)) for _ in range(choices)]
    return requests


def make_work(vocab_size: int, documents: int, device: torch.device) -> Work:
    """Return a model of the suites' cpu scale (4 layers, width 128, context 256) with its requests."""
    config = GPTConfig(vocab_size=vocab_size, n_layers=4, n_heads=4, d_model=128, max_seq_len=256)
    model = GPT(config)
    initialize(model, seed=0)
    scale = 1.0 if vocab_size <= 257 else BYTES_PER_TOKEN
    return Work(model.to(device).eval(), make_requests(documents, vocab_size, scale), documents)


@torch.inference_mode()
def one_by_one(model: GPT, requests: Sequence[Request]) -> list[Score]:
    """Score request after request: a forward pass over each context and continuation, all logits."""
    scores = []
    device = model.embedding.weight.device
    for context, continuation in requests:
        ids = torch.tensor([(context + continuation)[-(model.config.max_seq_len + 1) :]], device=device)
        logs = model(ids[:, :-1])[0].float().log_softmax(dim=-1)[-len(continuation) :]  # C V
        targets = ids[0, -len(continuation) :]
        logprob = float(logs.gather(1, targets[:, None]).sum())
        scores.append(Score(logprob, bool((logs.argmax(dim=-1) == targets).all())))
    return scores


def candidates(work: Work) -> dict[str, Callable[[], list[Score]]]:
    """Return the ways to score the same requests."""
    return {
        BASELINE: lambda: one_by_one(work.model, work.requests),
        "batched by length": lambda: Scorer(work.model, share_contexts=False)(work.requests),
        "batched, contexts shared": lambda: Scorer(work.model)(work.requests),
    }


def measure(vocab_size: int, documents: int, device: torch.device, rounds: int) -> list[dict[str, Any]]:
    """Return one row per way: documents a second, speed-up over one by one with its interval, difference.

    Raises:
        ValueError: the ways disagree by more than rounding.
    """
    work = make_work(vocab_size, documents, device)
    ways = candidates(work)
    exact = ways[BASELINE]()
    worst = {name: _difference(way(), exact) for name, way in ways.items()}
    if max(worst.values()) > 1e-4:
        raise ValueError(f"scores differ by {max(worst.values())} nats per nat; the adapter is wrong")
    times = interleave(ways, rounds, BASELINE, device, warmup=1)
    rows = []
    for name, timing in times.items():
        low, high = timing.interval
        rows.append(
            {
                "vocabulary": vocab_size,
                "documents": documents,
                "requests": len(work.requests),
                "adapter": name,
                "documents_per_second": documents / timing.median_seconds,
                "speedup": 1 / timing.ratio,
                "speedup_low": 1 / high,
                "speedup_high": 1 / low,
                "largest_relative_difference": worst[name],
                "rounds": rounds,
            }
        )
    return rows


def _difference(found: Sequence[Score], exact: Sequence[Score]) -> float:
    return max(
        abs(a.logprob - b.logprob) / max(1.0, abs(b.logprob)) for a, b in zip(found, exact, strict=True)
    )
