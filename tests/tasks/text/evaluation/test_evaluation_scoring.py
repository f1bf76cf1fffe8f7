"""Log-likelihoods equal the definition, whatever is batched, shared or cut."""

import random
from typing import Any

import pytest
import torch

from tasks.text.evaluation.batching import Family, Piece, cut, family_batches, single_batches, split_families
from tasks.text.evaluation.scoring import Scorer
from xsa_core import VARIANTS

Request = tuple[list[int], list[int]]
# Sums of some thirty float64 logarithms of magnitude ten.
CLOSE = 1e-11


def draw_requests(seed: int, documents: int = 14, longest: int = 30, vocabulary: int = 17) -> list[Request]:
    """Multiple-choice documents: contexts up to beyond the model's 24, one to four continuations each."""
    draw = random.Random(seed)

    def tokens(most: int) -> list[int]:
        return [draw.randrange(vocabulary) for _ in range(draw.randint(1, most))]

    requests = []
    for _ in range(documents):
        context = tokens(longest)
        requests += [(context, tokens(8)) for _ in range(draw.choice((1, 2, 4)))]
    return requests


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_scores_equal_brute_force_for_every_variant(
    variant: str, make_gpt: Any, score_explicitly: Any
) -> None:
    model = make_gpt(variant=variant)
    requests = draw_requests(seed=1)
    assert split_families([p for r in requests for p in cut(*r, 24)])[0], "no context is shared: no test"
    found = Scorer(model, budget=120)(requests)
    for request, score in zip(requests, found, strict=True):
        expected, greedy = score_explicitly(model, *request)
        assert score.logprob == pytest.approx(expected, abs=CLOSE)
        assert score.greedy == greedy


@pytest.mark.parametrize(
    "changes",
    [{"n_kv_heads": 1}, {"n_sinks": 3}, {"layers": "first:1"}, {"strength": 0.5}, {"tie_embeddings": False}],
    ids=lambda changes: next(iter(changes)),
)
def test_scores_equal_brute_force_for_every_kind_of_model(
    changes: dict[str, Any], make_gpt: Any, score_explicitly: Any
) -> None:
    model = make_gpt(variant="xsa", **changes)
    requests = draw_requests(seed=2, documents=6)
    for request, score in zip(requests, Scorer(model)(requests), strict=True):
        assert score.logprob == pytest.approx(score_explicitly(model, *request)[0], abs=CLOSE)


def test_float32_scores_are_those_of_float64_to_rounding(make_gpt: Any) -> None:
    requests = draw_requests(seed=3)
    exact = Scorer(make_gpt())(requests)
    rounded = Scorer(make_gpt(dtype=torch.float32))(requests)
    for a, b in zip(exact, rounded, strict=True):
        # A few hundred roundings on the way to logits of magnitude ten.
        assert b.logprob == pytest.approx(a.logprob, abs=300 * torch.finfo(torch.float32).eps * 10)


@pytest.mark.parametrize("budget", [1, 50, 100_000])
def test_the_size_of_batches_changes_no_score(budget: int, make_gpt: Any) -> None:
    model, requests = make_gpt(), draw_requests(seed=4)
    for a, b in zip(Scorer(model, budget)(requests), Scorer(model, 200)(requests), strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=CLOSE)
        assert a.greedy == b.greedy


def test_order_and_repetition_of_requests_change_no_score(make_gpt: Any) -> None:
    model, requests = make_gpt(), draw_requests(seed=5)
    order = random.Random(0).sample(range(len(requests)), len(requests))
    straight = Scorer(model)(requests)
    shuffled = Scorer(model)([requests[i] for i in order] + requests)
    for place, i in enumerate(order):
        assert shuffled[place].logprob == pytest.approx(straight[i].logprob, abs=CLOSE)
    assert shuffled[: len(order)] == [shuffled[len(order) + i] for i in order], "the same request, two scores"


def test_a_shared_context_is_read_once(make_gpt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_gpt()
    context = list(range(12))
    requests = [(context, [token, 3, 4]) for token in range(4)]
    read: list[int] = []
    original = model.hidden
    monkeypatch.setattr(
        model, "hidden", lambda tokens, **rest: read.append(tokens.numel()) or original(tokens, **rest)
    )
    Scorer(model)(requests)
    assert sum(read) == 12 + 4 * 2  # the context, and of each continuation all but the last token
    read.clear()
    Scorer(model, share_contexts=False)(requests)
    assert sum(read) == 4 * (12 + 2)


def test_one_token_continuations_cost_one_row_for_all(
    make_gpt: Any, score_explicitly: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_gpt()
    context = [5, 2, 9, 11]
    rows: list[tuple[int, ...]] = []
    original = model.hidden
    monkeypatch.setattr(
        model, "hidden", lambda tokens, **rest: rows.append(tuple(tokens.shape)) or original(tokens, **rest)
    )
    scores = Scorer(model)([(context, [token]) for token in range(17)])
    assert rows == [(1, 4)]
    assert sum(torch.tensor([s.logprob for s in scores]).exp().tolist()) == pytest.approx(1.0)
    assert sum(s.greedy for s in scores) == 1
    monkeypatch.undo()
    assert scores[7].logprob == pytest.approx(score_explicitly(model, context, [7])[0], abs=CLOSE)


def test_the_left_end_is_cut_exactly_as_the_harness_cuts_it(make_gpt: Any, score_explicitly: Any) -> None:
    model = make_gpt(max_seq_len=10)
    draw = random.Random(6)
    context = [draw.randrange(17) for _ in range(40)]
    requests = [(context[-n:], [3, 1, 4]) for n in (7, 8, 9, 40)]  # 10, 11 (fits: one is not read), 12, 43
    scorer = Scorer(model)
    found = scorer(requests)
    for request, score in zip(requests, found, strict=True):
        assert score.logprob == pytest.approx(score_explicitly(model, *request)[0], abs=CLOSE)
    assert found[1].logprob == pytest.approx(found[3].logprob, abs=CLOSE)  # nothing before is seen
    assert abs(found[0].logprob - found[1].logprob) > 1e-3
    assert scorer.counts.cut_contexts == 2


def test_a_continuation_longer_than_the_model_is_scored_in_blocks_with_all_context_that_fits(
    make_gpt: Any, score_explicitly: Any
) -> None:
    limit = 10
    model = make_gpt(max_seq_len=limit)
    draw = random.Random(7)
    context, continuation = ([draw.randrange(17) for _ in range(n)] for n in (4, 23))
    scorer = Scorer(model)
    (found,) = scorer([(context, continuation)])
    expected = 0.0
    for start in range(0, 23, limit // 2):
        block = continuation[start : start + limit // 2]
        expected += score_explicitly(model, context + continuation[:start], block)[0]
    assert found.logprob == pytest.approx(expected, abs=CLOSE)
    assert scorer.counts.split_continuations == 1


def test_nothing_has_probability_one_and_no_context_is_refused(make_gpt: Any) -> None:
    scorer = Scorer(make_gpt())
    (nothing,) = scorer([([1, 2], [])])
    assert nothing.logprob == 0.0
    with pytest.raises(ValueError, match="at least one token"):
        scorer([([], [1])])


def test_a_device_that_runs_out_of_memory_gets_smaller_batches_and_the_same_scores(
    make_gpt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, requests = make_gpt(), draw_requests(seed=8)
    expected = Scorer(model)(requests)
    scorer = Scorer(model, budget=1000)
    original, sizes = model.hidden, []

    def small_memory(tokens: torch.Tensor, **rest: Any) -> torch.Tensor:
        sizes.append(tokens.numel())
        if tokens.numel() > 90:
            raise torch.OutOfMemoryError("made up")
        return original(tokens, **rest)

    monkeypatch.setattr(model, "hidden", small_memory)
    found = scorer(requests)
    assert max(sizes) > 90
    assert scorer.budget < 1000
    assert [s.logprob for s in found] == pytest.approx([s.logprob for s in expected], abs=CLOSE)


def test_evaluation_mode_is_used_and_given_back(make_gpt: Any) -> None:
    model, requests = make_gpt(dropout=0.5), draw_requests(seed=9, documents=4)
    model.train()
    first = Scorer(model)(requests)
    assert model.training
    assert Scorer(model)(requests) == first, "dropout was on"


def _random_pieces(seed: int) -> list[Piece]:
    return list(dict.fromkeys(p for r in draw_requests(seed, documents=40) for p in cut(*r, 24)))


@pytest.mark.parametrize("budget", [24, 100, 1000])
@pytest.mark.parametrize("seed", range(3))
def test_batches_hold_every_piece_once_and_keep_to_budget_and_model(seed: int, budget: int) -> None:
    pieces = _random_pieces(seed)
    families, singles = split_families(pieces)
    rows = single_batches(singles, budget, 24)
    assert sorted(p.inputs for batch in rows for p in batch) == sorted(p.inputs for p in singles)
    for batch in rows:
        assert len(batch) == 1 or len(batch) * max(len(p.inputs) for p in batch) <= budget
    groups = family_batches(families, budget, 24)
    spread = [Piece(f.prefix, t) for batch in groups for f in batch for t in f.targets]
    assert sorted(spread, key=lambda p: (p.prefix, p.target)) == sorted(
        (p for p in pieces if p not in set(singles)), key=lambda p: (p.prefix, p.target)
    )
    for batch in groups:
        prefix, rest = max(len(f.prefix) for f in batch), max(f.rest for f in batch)
        targets = sum(len(f.targets) for f in batch)
        assert prefix + rest <= 24
        if len(batch) > 1:
            assert len(batch) * prefix <= budget
            assert targets * rest <= budget
            assert targets * (prefix + rest) <= 4 * budget


def test_batches_are_as_large_as_the_budget_allows() -> None:
    pieces = [Piece((1,) * n, (2,)) for n in (4, 4, 4, 4, 3, 3)]
    assert [len(batch) for batch in single_batches(pieces, 12, 24)] == [3, 3]
    families = [Family((n,) * 4, ((1, 2), (3, 4))) for n in range(5)]
    batches = family_batches(families, 12, 24)
    assert [len(batch) for batch in batches] == [3, 2]
