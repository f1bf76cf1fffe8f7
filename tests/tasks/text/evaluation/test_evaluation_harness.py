"""The adapter gives the harness what its own definition of a language model asks for."""

import math
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

from tasks.errors import UserError
from tasks.text.evaluation.harness import HarnessModel, generation_options
from tasks.text.prepare.tokenizers import make_tokenizer
from tasks.text.trained import NEWLINE, Trained

CLOSE = 1e-10


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=a, idx=i) for i, a in enumerate(arguments)]


@pytest.fixture(scope="module")
def gpt2_model(make_gpt: Any) -> Trained:
    """A decoder over GPT-2's vocabulary, padded as trainers pad it."""
    return Trained(make_gpt(50304, dtype=torch.float32, max_seq_len=64), make_tokenizer("gpt2"))


def test_it_is_a_language_model_of_the_harness(byte_model: Trained) -> None:
    assert isinstance(HarnessModel(byte_model), LM)


def test_loglikelihoods_of_texts_equal_brute_force(byte_model: Trained, score_explicitly: Any) -> None:
    pairs = [("The cat", " sat"), ("The cat", " lay down"), ("é", "é"), ("x" * 90, " yes"), ("x" * 90, " no")]
    found = HarnessModel(byte_model).loglikelihood(requests("loglikelihood", *pairs))
    for (context, continuation), (logprob, greedy) in zip(pairs, found, strict=True):
        expected = score_explicitly(
            byte_model.model, byte_model.encode(context), byte_model.encode(continuation)
        )
        assert logprob == pytest.approx(expected[0], abs=CLOSE)
        assert greedy == expected[1]


def test_spaces_at_the_end_of_a_context_belong_to_the_continuation(
    byte_model: Trained, score_explicitly: Any
) -> None:
    adapter = HarnessModel(byte_model)
    ((moved, _),) = adapter.loglikelihood(requests("loglikelihood", ("The cat ", "sat")))
    expected = score_explicitly(byte_model.model, byte_model.encode("The cat"), byte_model.encode(" sat"))
    assert moved == pytest.approx(expected[0], abs=CLOSE)


def test_the_boundary_is_drawn_in_the_encoding_of_both_together(
    gpt2_model: Trained, score_explicitly: Any
) -> None:
    adapter = HarnessModel(gpt2_model)
    encode = gpt2_model.encode
    # The second pair merges across the boundary: encoded together, the first token is another one.
    pairs = [("The capital of France is", " Paris"), ("hel", "loworld")]
    assert encode("helloworld")[: len(encode("hel"))] != encode("hel")
    found = adapter.loglikelihood(requests("loglikelihood", *pairs))
    for (context, continuation), (logprob, _) in zip(pairs, found, strict=True):
        whole, ids = encode(context + continuation), encode(context)
        expected = score_explicitly(gpt2_model.model, ids, whole[len(ids) :])
        assert logprob == pytest.approx(expected[0], abs=1e-3)


def test_a_merge_that_swallows_the_continuation_still_scores_it(gpt2_model: Trained) -> None:
    encode = gpt2_model.encode
    assert len(encode("the")) == len(encode("th")) == 1
    ((logprob, _),) = HarnessModel(gpt2_model).loglikelihood(requests("loglikelihood", ("th", "e")))
    assert logprob < 0  # of "the" after an end of text, not of nothing


def test_a_text_without_context_follows_the_prefix_token(
    byte_model: Trained, gpt2_model: Trained, score_explicitly: Any
) -> None:
    for trained, prefix, close in ((byte_model, NEWLINE, CLOSE), (gpt2_model, 50256, 1e-3)):
        adapter = HarnessModel(trained)
        assert adapter.prefix_token_id == prefix
        ((logprob, _),) = adapter.loglikelihood(requests("loglikelihood", ("", "word")))
        expected = score_explicitly(trained.model, [prefix], trained.encode("word"))
        assert logprob == pytest.approx(expected[0], abs=close)


def test_nothing_to_continue_with_has_probability_one(byte_model: Trained) -> None:
    found = HarnessModel(byte_model).loglikelihood(requests("loglikelihood", ("a", ""), ("", "")))
    assert [logprob for logprob, _ in found] == [0.0, 0.0]


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 200])
def test_rolling_scores_every_token_once_with_full_windows(
    length: int, byte_model: Trained, score_explicitly: Any
) -> None:
    text = "".join(chr(97 + (i * i) % 26) for i in range(length))
    (found,) = HarnessModel(byte_model).loglikelihood_rolling(requests("loglikelihood_rolling", (text,)))
    ids, limit = [NEWLINE, *byte_model.encode(text)], byte_model.model.config.max_seq_len
    # Written out: windows of `limit` predictions; the last one is moved back to be full.
    expected, start = 0.0, 1
    while start < len(ids):
        end = min(start + limit, len(ids))
        context = ids[start - 1 : start] if end - start == limit else ids[max(0, end - 1 - limit) : start]
        expected += score_explicitly(byte_model.model, context, ids[start:end])[0]
        start = end
    assert found == pytest.approx(expected, abs=CLOSE * max(1, length))


def test_rolling_keeps_texts_apart(byte_model: Trained) -> None:
    adapter = HarnessModel(byte_model)
    texts = ["first text " * 12, "second", "third text " * 20]
    together = adapter.loglikelihood_rolling(requests("loglikelihood_rolling", *((t,) for t in texts)))
    for text, total in zip(texts, together, strict=True):
        (alone,) = adapter.loglikelihood_rolling(requests("loglikelihood_rolling", (text,)))
        assert total == pytest.approx(alone, abs=CLOSE)


def test_generation_gives_each_request_its_own_options_in_order(
    byte_model: Trained, continue_explicitly: Any
) -> None:
    adapter = HarnessModel(byte_model)
    texts = ["one", "two words", "three of them"]
    found = adapter.generate_until(
        requests(
            "generate_until",
            (texts[0], {"until": [], "max_gen_toks": 5}),
            (texts[1], {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": False, "temperature": 0.0}),
            (texts[2], {"until": [], "max_gen_toks": 5}),
        )
    )
    for text, count, answer in zip(texts, (5, 12, 5), found, strict=True):
        ids = continue_explicitly(byte_model.model, byte_model.encode(text), count)
        assert answer == byte_model.decode(ids).split("\n\n")[0]


def test_generation_options_are_read_as_the_harness_means_them() -> None:
    options = generation_options({"until": ["Q:", ""], "max_new_tokens": 7, "top_p": 1.0})
    assert (options.until, options.max_new, options.temperature) == (("Q:",), 7, 0.0)
    assert generation_options({"until": "\n"}).max_new == 256
    assert generation_options({"do_sample": True, "temperature": 0.5}).temperature == 0.5
    assert generation_options({"do_sample": False, "temperature": 0.5}).temperature == 0.0


def test_a_generation_option_that_is_not_offered_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"top_p=0\.9"):
        generation_options({"do_sample": True, "temperature": 1.0, "top_p": 0.9})


def test_answers_reach_the_harness_cache(byte_model: Trained) -> None:
    adapter = HarnessModel(byte_model)
    kept: list[tuple[str, Any, Any]] = []
    adapter.cache_hook.add_partial = lambda *entry: kept.append(entry)
    answers = adapter.loglikelihood(requests("loglikelihood", ("a", "b"), ("a", "c")))
    totals = adapter.loglikelihood_rolling(requests("loglikelihood_rolling", ("abc",)))
    assert kept == [
        ("loglikelihood", ("a", "b"), answers[0]),
        ("loglikelihood", ("a", "c"), answers[1]),
        ("loglikelihood_rolling", ("abc",), totals[0]),
    ]
    assert all(math.isfinite(logprob) for logprob, _ in answers)
