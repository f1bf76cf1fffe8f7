"""Masks against definitions written with loops, and what they promise about influence."""

import itertools

import pytest
import torch
from operator_oracle import assert_close, correlated, gradients

from xsa_core.attention import Mask, exclusive_attention

B, N = 2, 9
PADDING = torch.tensor([[True] * 9, [True] * 5 + [False] * 4])
LEFT = torch.tensor([[True] * 9, [False] * 4 + [True] * 5])
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [5, 5, 5, 5, 5, 5, 5, 5, 7]])
PREFIX = torch.tensor([3, 0])

RULES = {
    "causal": (Mask.causal, lambda b, i, j: j <= i),
    "full": (Mask.full, lambda b, i, j: True),
    "prefix": (lambda: Mask.prefix(PREFIX), lambda b, i, j: j <= i or j < PREFIX[b]),
    "padding": (lambda: Mask.padding(PADDING), lambda b, i, j: bool(PADDING[b, j])),
    "left padding": (lambda: Mask.padding(LEFT), lambda b, i, j: bool(LEFT[b, j])),
    "window": (lambda: Mask.window(3), lambda b, i, j: abs(i - j) < 3),
    "documents": (
        lambda: Mask.documents(DOCUMENTS),
        lambda b, i, j: bool(DOCUMENTS[b, i] == DOCUMENTS[b, j]),
    ),
}


def by_definition(rules, T, S, *, force_self):
    seen = torch.zeros(B, 1, T, S, dtype=torch.bool)
    for b, t, j in itertools.product(range(B), range(T), range(S)):
        i = t + S - T
        seen[b, 0, t, j] = all(rule(b, i, j) for rule in rules) or (force_self and i == j)
    return seen


@pytest.mark.parametrize("T", [9, 4, 1])
@pytest.mark.parametrize(
    "names", [*itertools.combinations(RULES, 1), *itertools.combinations(RULES, 2)], ids="+".join
)
def test_dense_form_is_the_definition(names, T):
    mask = Mask.full()
    for name in names:
        mask = mask & RULES[name][0]()
    positional = any("padding" not in name and name != "full" for name in names)
    expected = by_definition([RULES[n][1] for n in names], T, N, force_self=T == N or positional)
    assert torch.equal(mask.to_dense(B, T, N, "cpu").expand(B, 1, T, N), expected)


@pytest.mark.parametrize("T", [9, 4])
def test_exclude_self_hides_the_diagonal_unless_nothing_else_is_seen(T):
    dense = Mask.causal(exclude_self=True).to_dense(B, T, N, "cpu")[0, 0]
    for t in range(T):
        i = t + N - T
        assert dense[t].nonzero().flatten().tolist() == (list(range(i)) or [0])


def test_conjunction_keeps_every_rule():
    joined = Mask.window(5) & Mask.window(3) & Mask.padding(PADDING) & Mask.padding(LEFT) & Mask.prefix(2)
    assert joined.window_size == 3
    assert torch.equal(joined.key_padding, PADDING & LEFT)
    assert joined.features == {"window", "padding", "prefix"}
    assert (joined & Mask.causal()).features == {"window", "padding", "causal"}


def test_padded_keys_have_no_influence():
    q, k, v = (correlated(B, N, 2, 8, seed=i) for i in range(3))
    noisy = [x + 100.0 * ~PADDING[:, :, None, None] for x in (q, k, v)]
    real = PADDING[:, :, None, None]

    def run(q, k, v):
        return exclusive_attention(q, k, v, mask=Mask.padding(PADDING)) * real

    for a, b in zip(gradients(run, (q, k, v), q), gradients(run, noisy, q), strict=True):
        assert_close([a * real], [b * real], torch.float64)
        assert not (a * ~real).any()


def test_left_padding_leaves_no_row_empty():
    q, k, v = (correlated(B, N, 2, 8, seed=i) for i in range(3))
    out = exclusive_attention(q, k, v, mask=Mask.padding(LEFT) & Mask.causal(), strength=None)
    assert torch.isfinite(out).all()
    alone = exclusive_attention(*(x[1:, 4:] for x in (q, k, v)), causal=True, strength=None)
    assert_close([out[1:, 4:]], [alone], torch.float64)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_packed_documents_equal_separate_sequences(causal, backend):
    lengths = [3, 4, 2]
    q, k, v = (correlated(1, N, 2, 8, seed=i) for i in range(3))
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))

    def packed(q, k, v):
        return exclusive_attention(q, k, v, causal=causal, mask=Mask.documents(ids), backend=backend)

    def separate(q, k, v):
        parts = zip(*(x.split(lengths, dim=1) for x in (q, k, v)), strict=True)
        return torch.cat([exclusive_attention(*p, causal=causal, backend=backend) for p in parts], dim=1)

    assert_close(gradients(packed, (q, k, v), q), gradients(separate, (q, k, v), q), torch.float64, factor=16)


@pytest.mark.parametrize("chunks", [[9], [1] * 9, [4, 3, 2], [5, 1, 3]])
@pytest.mark.parametrize(
    "mask", [Mask.causal(), Mask.causal() & Mask.window(3), Mask.prefix(2)], ids=["c", "w", "p"]
)
def test_chunks_with_a_cache_equal_the_whole(chunks, mask):
    q, k, v = (correlated(1, N, 2, 8, seed=i) for i in range(3))
    whole = exclusive_attention(q, k, v, mask=mask)
    pieces, start = [], 0
    for size in chunks:
        stop = start + size
        own = v[:, start:stop]
        pieces.append(exclusive_attention(q[:, start:stop], k[:, :stop], v[:, :stop], mask=mask, own_v=own))
        start = stop
    expected = whole if mask.prefix_lengths is None or chunks[0] >= 2 else None
    if expected is None:  # a prefix is bidirectional: a first chunk shorter than it cannot see what it should
        pieces, whole = pieces[2:], whole[:, 2:]
    assert_close([torch.cat(pieces, dim=1)], [whole], torch.float64)


def test_padding_across_sequences_of_another_length_hides_and_nothing_else():
    dense = Mask.padding(PADDING).to_dense(B, 4, N, "cpu")
    assert torch.equal(dense.expand(B, 1, 4, N), PADDING[:, None, None].expand(B, 1, 4, N))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mask.window(0), "at least the token itself"),
        (lambda: Mask.padding(torch.ones(2, 3)), "bool tensor"),
        (lambda: Mask.padding(torch.tensor([[True, False], [False, False]])), "hides every token"),
        (lambda: Mask.documents(torch.zeros(2, 3)), "integer tensor"),
        (lambda: Mask.prefix(torch.zeros(2)), "integer tensor"),
        (lambda: Mask.causal().to_dense(1, 5, 3, "cpu"), "position of their own"),
        (lambda: Mask.padding(PADDING).to_dense(2, 9, 8, "cpu"), "cover every key"),
        (lambda: Mask.prefix(torch.tensor([1, 2, 3])).to_dense(2, 4, 4, "cpu"), "one length per sequence"),
    ],
)
def test_masks_that_cannot_be_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_bare_tensor_is_no_mask():
    q = torch.randn(1, 3, 1, 4)
    with pytest.raises(ValueError, match=r"Mask\.padding"):
        exclusive_attention(q, q, q, mask=torch.ones(1, 3, dtype=torch.bool))
