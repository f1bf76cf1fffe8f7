"""Small decoders and a brute-force oracle: one request at a time, without cache, in float64."""

import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluation_documents import write_documents

from tasks.text.tokenizer import ByteTokenizer
from tasks.text.trained import Trained
from xsa_core import GPT, GPTConfig, initialize

VOCABULARY = 17


def small_gpt(vocab_size: int = VOCABULARY, dtype: torch.dtype = torch.float64, **changes: Any) -> GPT:
    """A seeded decoder of two layers; its weights are large enough that tokens differ in likelihood."""
    sizes = {"n_layers": 2, "d_model": 16, "n_heads": 2, "max_seq_len": 24} | changes
    model = GPT(GPTConfig(vocab_size=vocab_size, **sizes))
    initialize(model, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)
    return model.to(dtype).eval()


@torch.no_grad()
def explicit_score(model: GPT, context: Sequence[int], continuation: Sequence[int]) -> tuple[float, bool]:
    """The definition: token after token, each given the last `max_seq_len` of what the harness leaves."""
    limit = model.config.max_seq_len
    kept = [*context, *continuation][-(limit + 1) :]
    total, greedy = 0.0, True
    for place in range(len(kept) - len(continuation), len(kept)):
        logits = model(torch.tensor([kept[:place]]))[0, -1].double()
        exps = torch.exp(logits - logits.max())
        total += float(torch.log(exps[kept[place]] / exps.sum()))
        greedy &= int(logits.argmax()) == kept[place]
    return total, greedy


@torch.no_grad()
def explicit_continuation(model: GPT, prompt: Sequence[int], count: int) -> list[int]:
    """The likeliest tokens, one at a time, reading everything anew; nothing slides."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.fixture(scope="session")
def make_gpt() -> Callable[..., GPT]:
    """Return the maker of small decoders."""
    return small_gpt


@pytest.fixture(scope="session")
def score_explicitly() -> Callable[..., tuple[float, bool]]:
    """Return the oracle of log-likelihoods."""
    return explicit_score


@pytest.fixture(scope="session")
def continue_explicitly() -> Callable[..., list[int]]:
    """Return the oracle of greedy continuations."""
    return explicit_continuation


@pytest.fixture(scope="session")
def byte_model() -> Trained:
    """A decoder over bytes with a window of 64, in float64."""
    return Trained(small_gpt(256, max_seq_len=64), ByteTokenizer())


@pytest.fixture(scope="session")
def made_up_documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for --data-dir with six made-up documents of each of the eight tasks."""
    return write_documents(tmp_path_factory.mktemp("documents"))


@pytest.fixture(autouse=True, scope="module")
def _no_network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Whoever asks the network here fails, and nothing lands in the user's cache."""

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a test asked the network")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", refuse)
        patch.setattr(socket, "getaddrinfo", refuse)
        # Of the cache only the documents' part: a compiled kernel is not to be built anew.
        folder = tmp_path_factory.getbasetemp() / "cache"
        patch.setattr("tasks.text.evaluation.tasks.cache_root", lambda: folder)
        yield
