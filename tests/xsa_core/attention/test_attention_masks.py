"""Masks against definitions written with loops, and what they promise about influence."""

import itertools

import numpy as np
import pytest
import torch
from operator_oracle import assert_close, correlated, gradients, loop_attention

from xsa_core.attention import Mask, attention_with_lse, exclusive_attention
from xsa_core.attention.documents import packed_documents

B, N = 2, 9
PADDING = torch.tensor([[True] * 9, [True] * 5 + [False] * 4])
LEFT = torch.tensor([[True] * 9, [False] * 4 + [True] * 5])
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [5, 5, 5, 5, 5, 5, 5, 5, 7]])
PREFIX = torch.tensor([3, 0])
IDS = torch.tensor([3, 3, 4, 4, 4, -5, -5, -5, 9])

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


CONSTRUCTED = {
    "whole prefix": (lambda: Mask.prefix(4), lambda b, i, j: j <= i or j < 4),
    "numpy prefix": (lambda: Mask.prefix(np.int64(4)), lambda b, i, j: j <= i or j < 4),
    "no prefix": (lambda: Mask.prefix(0), lambda b, i, j: j <= i),
    "long prefix": (lambda: Mask.prefix(N + 5), lambda b, i, j: True),
    "one prefix for all": (lambda: Mask.prefix(torch.tensor([2])), lambda b, i, j: j <= i or j < 2),
    "short prefix ints": (
        lambda: Mask.prefix(torch.tensor([1, 6], dtype=torch.int8)),
        lambda b, i, j: j <= i or j < (1, 6)[b],
    ),
    "itself alone": (lambda: Mask.window(1), lambda b, i, j: i == j),
    "wide window": (lambda: Mask.window(N), lambda b, i, j: True),
    "numpy window": (lambda: Mask.window(np.int32(4)), lambda b, i, j: abs(i - j) < 4),
    "causal window": (lambda: Mask.window(4) & Mask.causal(), lambda b, i, j: i - 4 < j <= i),
    "prefix within a window": (
        lambda: Mask.window(4) & Mask.prefix(5),
        lambda b, i, j: abs(i - j) < 4 and (j <= i or j < 5),
    ),
    "one row of documents": (lambda: Mask.documents(IDS), lambda b, i, j: bool(IDS[i] == IDS[j])),
    "unsigned ids that return": (
        lambda: Mask.documents((IDS % 2).to(torch.uint8)),
        lambda b, i, j: bool(IDS[i] % 2 == IDS[j] % 2),
    ),
    "documents twice": (
        lambda: Mask.documents(IDS) & Mask.documents(DOCUMENTS),
        lambda b, i, j: bool(IDS[i] == IDS[j] and DOCUMENTS[b, i] == DOCUMENTS[b, j]),
    ),
}


@pytest.mark.parametrize("T", [9, 4])
@pytest.mark.parametrize("name", CONSTRUCTED)
def test_what_a_constructor_makes_is_what_it_says(name, T):
    make, rule = CONSTRUCTED[name]
    expected = by_definition([rule], T, N, force_self=True)
    assert torch.equal(make().to_dense(B, T, N, "cpu").expand(B, 1, T, N), expected)


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


LAYOUTS = {
    "one row": ([[40, 65, 95, 100]], 1),
    "rows alike": ([[40, 65, 95, 100]], 3),
    "rows apart": ([[300], [40, 260], [40, 260], [100, 1, 199]], 4),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("strength", [None, 1.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_packed_documents_equal_separate_sequences_bit_for_bit_on_the_cpu(
    layout, strength, dtype, with_sinks
):
    lengths, rows = LAYOUTS[layout]
    T, causal = 300, layout != "rows alike"
    q, k, v = (correlated(rows, T, h, 8, seed=i).to(dtype) for i, h in enumerate((4, 2, 2)))
    sinks = tuple(correlated(3, 1, 2, 8, seed=i)[:, 0].to(dtype) for i in (7, 8)) if with_sinks else None
    ids = torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths])
    options = {"causal": causal, "strength": strength, "sinks": sinks, "backend": "sdpa"}

    def packed(q, k, v):
        return exclusive_attention(q, k, v, mask=Mask.documents(ids), **options)

    def separate(q, k, v):
        done = []
        for row, own in zip(range(rows), lengths * (rows // len(lengths)), strict=True):
            parts = zip(*(x[row : row + 1].split(own, dim=1) for x in (q, k, v)), strict=True)
            done.append(torch.cat([exclusive_attention(*p, **options) for p in parts], dim=1))
        return torch.cat(done)

    found, expected = gradients(packed, (q, k, v), q), gradients(separate, (q, k, v), q)
    if with_sinks:  # merged for the whole row by products of another shape
        assert_close(found, [x.double() for x in expected], dtype, factor=16)
    else:
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_the_log_sum_exp_of_packed_documents_is_theirs():
    q, k, v = (correlated(2, 300, h, 8, seed=i) for i, h in enumerate((4, 2, 2)))
    mask = Mask.documents(torch.arange(300) // 130) & Mask.causal()
    assert packed_documents(mask, 2, 300, 300) is not None

    def run(backend):
        def call(q, k, v):
            y, lse = attention_with_lse(q, k, v, mask=mask, backend=backend)
            return torch.cat([y, lse.transpose(1, 2).unsqueeze(-1)], dim=-1)

        return call

    weight = correlated(2, 300, 4, 9, seed=5)
    runs = [gradients(run(backend), (q, k, v), weight) for backend in ("sdpa", "reference")]
    assert_close(*runs, torch.float64)


@pytest.mark.parametrize("why", ["short", "returning", "window"])
def test_documents_that_a_dense_mask_serves_better_agree_with_the_reference(why):
    ids = torch.arange(200) // {"short": 3, "returning": 40, "window": 40}[why] % 4 + (
        torch.arange(200) if why == "short" else 0
    )
    mask = Mask.documents(ids) & (Mask.window(7) if why == "window" else Mask.full())
    assert packed_documents(mask, 1, 200, 200) is None
    q, k, v = (correlated(1, 200, 1, 8, seed=i) for i in range(3))
    runs = [
        gradients(lambda q, k, v, b=b: exclusive_attention(q, k, v, mask=mask, backend=b), (q, k, v), q)
        for b in ("sdpa", "reference")
    ]
    assert_close(*runs, torch.float64)


@pytest.mark.parametrize("change", ["in place", "numpy", "data", "inference"])
@pytest.mark.parametrize("rule", ["documents", "documents of one row", "padding", "prefix"])
@pytest.mark.parametrize("used", [False, True])
def test_a_mask_stays_what_it_was_whatever_becomes_of_its_tensor(rule, change, used):
    content = {
        "documents": np.arange(300)[None] // 100,
        "documents of one row": np.arange(300) // 100,
        "padding": np.arange(300)[None] < 200,
        "prefix": np.array([70]),
    }[rule]
    with torch.inference_mode(change == "inference"):
        tensor = torch.from_numpy(content) if change == "numpy" else torch.tensor(content)
        mask = getattr(Mask, rule.split()[0])(tensor)
    q, k, v = (correlated(1, 300, 1, 8, seed=i) for i in range(3))
    before = mask.to_dense(1, 300, 300, "cpu")
    if used:
        exclusive_attention(q, k, v, mask=mask)
    if change == "numpy":
        content[...] = 1
    elif change == "data":
        tensor.data.fill_(1)
    else:
        with torch.inference_mode(change == "inference"):
            tensor.fill_(1)
    assert torch.equal(mask.to_dense(1, 300, 300, "cpu"), before)
    found = exclusive_attention(q, k, v, mask=mask)
    assert_close([found], [loop_attention(q, k, v, visible=before[:, 0])], torch.float64)


def test_several_descriptions_of_documents_hold_together():
    first = torch.arange(300) // 100
    second = (torch.arange(300) >= 150).long()
    joined = Mask.documents(first) & Mask.documents(second)
    found = packed_documents(joined, 1, 300, 300)
    assert [(p.tokens.start, p.tokens.stop) for p in found.pieces] == [
        (0, 100),
        (100, 150),
        (150, 200),
        (200, 300),
    ]
    q, k, v = (correlated(1, 300, 1, 8, seed=i) for i in range(3))
    runs = [exclusive_attention(q, k, v, mask=joined, backend=b) for b in ("sdpa", "reference")]
    assert_close(runs[:1], runs[1:], torch.float64)


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
        (lambda: Mask.padding([[True]]), "bool tensor .* got a list"),
        (lambda: Mask.padding(None), "bool tensor .* got a NoneType"),
        (lambda: Mask.documents([0, 1]), "integer tensor .* got a list"),
        (lambda: Mask.prefix(None), "got None"),
        (lambda: Mask.prefix(torch.tensor([2, -1])), r"got \[2, -1\]"),
        (lambda: Mask.padding(torch.tensor([[True, False], [False, False]])), "hides every token"),
        (lambda: Mask.documents(torch.zeros(2, 3)), "integer tensor"),
        (lambda: Mask.documents(torch.ones(2, 3, dtype=torch.bool)), "integer tensor"),
        (lambda: Mask.documents(torch.ones(1, 2, 3, dtype=torch.int64)), r"shape \(1, 2, 3\)"),
        (lambda: Mask.documents(torch.tensor(3)), "number the documents"),
        (lambda: Mask.prefix(torch.zeros(2)), "integer tensor"),
        (lambda: Mask.prefix(torch.ones(2, dtype=torch.bool)), "integer tensor"),
        (lambda: Mask.prefix(torch.ones(2, 1, dtype=torch.int64)), "one length per sequence"),
        (lambda: Mask.prefix(2.0), r"got 2\.0"),
        (lambda: Mask.prefix(True), "got True"),
        (lambda: Mask.prefix(-1), "got -1"),
        (lambda: Mask.window(-3), "got size -3"),
        (lambda: Mask.window(2.5), "whole number"),
        (lambda: Mask.window(True), "whole number"),
        (lambda: Mask.window(torch.tensor(3)), "whole number"),
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
