"""The operator against an explicit per-head loop in float64."""

import pytest
import torch
from operator_oracle import assert_close, causal_visible, correlated, gradients, loop_attention

from xsa_core.attention import Mask, exclusive_attention

BACKENDS = ("reference", "sdpa")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def inputs(B, T, S, H, Hkv, Dk, Dv, *, seed=0):
    return (
        correlated(B, T, H, Dk, seed=seed, shared=0.0),
        correlated(B, S, Hkv, Dk, seed=seed + 1, shared=0.5),
        correlated(B, S, Hkv, Dv, seed=seed + 2),
    )


def compare(dtype, tensors, fast, slow, *, factor=64.0):
    """Output and gradients of ``fast`` in ``dtype`` against ``slow`` in float64, on the same numbers."""
    rounded = [t.to(dtype) for t in tensors]
    output = slow(*(t.double() for t in rounded))
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(
        dtype
    )
    found = gradients(fast, rounded, weight)
    expected = gradients(slow, [t.double() for t in rounded], weight.double())
    assert_close(found, expected, dtype, factor=factor)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("H", "Hkv", "T", "causal"),
    [
        (2, 2, 1, True),
        (4, 2, 2, True),
        (4, 1, 2, False),
        (2, 2, 127, True),
        (4, 2, 130, True),
        (3, 1, 127, False),
    ],
)
def test_output_and_gradients_equal_an_explicit_loop(backend, dtype, H, Hkv, T, causal):
    compare(
        dtype,
        inputs(2, T, T, H, Hkv, 16, 16),
        lambda q, k, v: exclusive_attention(q, k, v, causal=causal, backend=backend),
        lambda q, k, v: loop_attention(q, k, v, visible=causal_visible(2, T, T) if causal else None),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("D", [16, 24, 32, 40, 64, 80, 96, 128, 192, 256])
def test_every_head_size_agrees_with_the_loop(dtype, D):
    compare(
        dtype,
        inputs(1, 33, 33, 2, 1, D, D),
        lambda q, k, v: exclusive_attention(q, k, v, causal=True, backend="sdpa"),
        lambda q, k, v: loop_attention(q, k, v, visible=causal_visible(1, 33, 33)),
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", ["number", "head", "token", "scalar"])
def test_strength_and_its_gradient_equal_the_loop(backend, dtype, shape):
    B, T, H = 2, 19, 4
    tensors = inputs(B, T, T, H, 2, 32, 32)
    visible = causal_visible(B, T, T)
    if shape == "number":
        compare(
            dtype,
            tensors,
            lambda q, k, v: exclusive_attention(q, k, v, causal=True, strength=0.3, backend=backend),
            lambda q, k, v: loop_attention(q, k, v, visible=visible, strength=0.3),
        )
        return
    size = {"head": (H,), "token": (B, T, H), "scalar": ()}[shape]
    strength = torch.linspace(-0.5, 1.5, int(torch.Size(size).numel()), dtype=torch.float64).reshape(size)
    compare(
        dtype,
        (*tensors, strength),
        lambda q, k, v, s: exclusive_attention(q, k, v, causal=True, strength=s, backend=backend),
        lambda q, k, v, s: loop_attention(q, k, v, visible=visible, strength=s),
        factor=128.0,  # the strength's gradient sums B T products more
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("T", "S"), [(1, 9), (4, 9), (9, 9)])
@pytest.mark.parametrize("causal", [True, False])
def test_own_values_of_the_query_tokens_are_excluded(backend, T, S, causal):
    own = correlated(2, T, 2, 8, seed=5)
    compare(
        torch.float64,
        (*inputs(2, T, S, 4, 2, 8, 8), own),
        lambda q, k, v, o: exclusive_attention(q, k, v, causal=causal, own_v=o, backend=backend),
        lambda q, k, v, o: loop_attention(
            q, k, v, own_v=o, visible=causal_visible(2, T, S) if causal else None
        ),
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bias_shape", [(2, 4, 7, 7), (4, 7, 7), (1, 4, 1, 7), (7, 7), (2, 1, 7, 1)])
@pytest.mark.parametrize("causal", [True, False])
def test_bias_gets_its_gradient(backend, bias_shape, causal):
    bias = torch.randn(bias_shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    compare(
        torch.float64,
        (*inputs(2, 7, 7, 4, 2, 8, 8), bias),
        lambda q, k, v, b: exclusive_attention(q, k, v, causal=causal, bias=b, backend=backend),
        lambda q, k, v, b: loop_attention(
            q, k, v, bias=b, visible=causal_visible(2, 7, 7) if causal else None
        ),
    )


def test_bias_without_gradient_takes_the_flash_kernel_and_agrees():
    bias = torch.randn(2, 4, 7, 7, generator=torch.Generator().manual_seed(3))
    compare(
        torch.float32,
        inputs(2, 7, 7, 4, 2, 8, 8),
        lambda q, k, v: exclusive_attention(q, k, v, causal=True, bias=bias, backend="sdpa"),
        lambda q, k, v: loop_attention(q, k, v, bias=bias.double(), visible=causal_visible(2, 7, 7)),
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("causal", "strength"), [(True, 1.0), (False, 0.4), (True, None)])
def test_sinks_join_the_softmax_and_the_exclusion(backend, dtype, causal, strength):
    sinks = correlated(3, 1, 2, 8, seed=7)[:, 0], correlated(3, 1, 2, 8, seed=8)[:, 0]  # (N, Hkv, D)
    visible = causal_visible(2, 11, 11) if causal else None
    compare(
        dtype,
        (*inputs(2, 11, 11, 4, 2, 8, 8), *sinks),
        lambda q, k, v, a, b: exclusive_attention(
            q, k, v, causal=causal, sinks=(a, b), strength=strength, backend=backend
        ),
        lambda q, k, v, a, b: loop_attention(q, k, v, sinks=(a, b), visible=visible, strength=strength),
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_values_may_have_another_size_than_keys(backend):
    compare(
        torch.float64,
        inputs(2, 6, 6, 4, 2, 8, 12),
        lambda q, k, v: exclusive_attention(q, k, v, causal=True, backend=backend),
        lambda q, k, v: loop_attention(q, k, v, visible=causal_visible(2, 6, 6)),
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_explicit_scale_is_used(backend):
    compare(
        torch.float64,
        inputs(1, 6, 6, 2, 2, 8, 8),
        lambda q, k, v: exclusive_attention(q, k, v, scale=0.9, backend=backend),
        lambda q, k, v: loop_attention(q, k, v, scale=0.9),
    )


@pytest.mark.parametrize("case", ["flash", "math", "strength", "sinks"])
def test_gradcheck(case):
    q, k, v = (t.requires_grad_() for t in inputs(1, 4, 4, 2, 1, 4, 4))
    bias = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    strength = torch.tensor([0.2, 0.9], dtype=torch.float64, requires_grad=True)
    sink_k, sink_v = (torch.randn(2, 1, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    run = {
        "flash": (lambda q, k, v: exclusive_attention(q, k, v, causal=True), (q, k, v)),
        "math": (lambda q, k, v, b: exclusive_attention(q, k, v, bias=b), (q, k, v, bias)),
        "strength": (lambda q, k, v, s: exclusive_attention(q, k, v, strength=s), (q, k, v, strength)),
        "sinks": (
            lambda q, k, v, a, b: exclusive_attention(q, k, v, sinks=(a, b)),
            (q, k, v, sink_k, sink_v),
        ),
    }[case]
    assert torch.autograd.gradcheck(*run)


def test_dropout_gradient_is_that_of_the_weights_it_kept():
    q, k, v = (t.requires_grad_() for t in inputs(1, 5, 5, 2, 1, 4, 4))

    def seeded(q, k, v):
        torch.manual_seed(3)
        return exclusive_attention(q, k, v, causal=True, dropout_p=0.4)

    assert not torch.equal(seeded(q, k, v), exclusive_attention(q, k, v, causal=True))
    assert torch.autograd.gradcheck(seeded, (q, k, v))


def test_dropout_keeps_the_mean_output():
    q, k, v = inputs(1, 4, 4, 1, 1, 4, 4)
    many = [t.expand(4000, -1, -1, -1) for t in (q, k, v)]
    dropped = exclusive_attention(*many, dropout_p=0.25, strength=None)
    plain = exclusive_attention(q, k, v, strength=None)
    error = dropped.std(dim=0) / 4000**0.5
    assert ((dropped.mean(dim=0) - plain[0]).abs() <= 5 * error).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("strength", [None, 0, 0.0])
def test_no_exclusion_is_torchs_attention_bit_for_bit(dtype, strength):
    q, k, v = (t.to(dtype) for t in inputs(2, 33, 33, 4, 4, 16, 16))

    def torchs(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    ours = gradients(
        lambda q, k, v: exclusive_attention(q, k, v, causal=True, strength=strength), (q, k, v), q
    )
    theirs = gradients(torchs, (q, k, v), q)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_single_token_has_nothing_left(backend, dtype):
    q, k, v = (t.to(dtype) for t in inputs(2, 1, 1, 4, 2, 16, 16))
    z, *grads = gradients(
        lambda q, k, v: exclusive_attention(q, k, v, causal=True, backend=backend),
        (q, k, v),
        torch.ones_like(q),
    )
    assert z.abs().max() <= 4 * torch.finfo(dtype).eps * v.abs().max()
    assert all(torch.isfinite(g).all() for g in grads)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_later_tokens_do_not_change_earlier_outputs(backend, dtype):
    q, k, v = (t.to(dtype) for t in inputs(1, 12, 12, 2, 1, 8, 8))
    before = exclusive_attention(q, k, v, causal=True, backend=backend)
    for t in range(1, 12):
        later = [x.clone() for x in (q, k, v)]
        for x in later:
            x[:, t:] += 1.0
        after = exclusive_attention(*later, causal=True, backend=backend)
        assert torch.equal(before[:, :t], after[:, :t])
        assert not torch.allclose(before[:, t:], after[:, t:])


def test_fused_projection_views_give_what_contiguous_tensors_give():
    fused = torch.randn(2, 17, (4 + 2 + 2) * 16, generator=torch.Generator().manual_seed(0))
    views = fused.unflatten(-1, (8, 16)).split([4, 2, 2], dim=2)
    assert not any(x.is_contiguous() for x in views)
    found = exclusive_attention(*views, causal=True)
    assert torch.equal(found, exclusive_attention(*(x.contiguous() for x in views), causal=True))
    assert found.is_contiguous()


@pytest.mark.parametrize("strength", [None, 1.0, 0.5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gradient_without_memory_of_its_own_is_taken(dtype, strength):
    tensors = [t.to(dtype) for t in inputs(2, 9, 9, 4, 2, 16, 16)]

    def summed(weight):
        leaves = [t.clone().requires_grad_() for t in tensors]
        out = exclusive_attention(*leaves, causal=True, strength=strength)
        (out.sum() if weight is None else (out * weight).sum()).backward()
        return [leaf.grad for leaf in leaves]

    expanded, dense = summed(None), summed(torch.ones(2, 9, 4, 16, dtype=dtype))
    assert all(torch.equal(a, b) for a, b in zip(expanded, dense, strict=True))


def test_an_empty_batch_passes_through():
    leaves = [t[:0].clone().requires_grad_() for t in inputs(1, 4, 4, 4, 2, 8, 8)]
    exclusive_attention(*leaves, causal=True).sum().backward()
    assert [leaf.grad.shape for leaf in leaves] == [leaf.shape for leaf in leaves]


def test_backends_agree_on_strided_rows():
    q, k, v = (x.transpose(2, 3).contiguous().transpose(2, 3) for x in inputs(1, 5, 5, 2, 2, 8, 8))
    a, b = (exclusive_attention(q, k, v, causal=True, backend=name) for name in BACKENDS)
    assert_close([a], [b], torch.float64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v": (1, 5, 3, 8)}, "Hkv dividing H"),
        ({"k": (1, 4, 2, 8), "v": (1, 4, 2, 8)}, "needs own_v"),
        ({"bias": (3, 5)}, "does not broadcast"),
        ({"strength": (3,)}, "does not broadcast"),
        ({"sink_k": (2, 2, 7)}, "sinks must be"),
        ({"q": (1, 0, 4, 8), "k": (1, 0, 2, 8), "v": (1, 0, 2, 8)}, "at least one query"),
    ],
)
def test_wrong_shapes_are_refused_with_what_was_expected(change, message):
    shapes = {"q": (1, 5, 4, 8), "k": (1, 5, 2, 8), "v": (1, 5, 2, 8)} | change
    made = {name: torch.randn(shape) for name, shape in shapes.items()}
    if "sink_k" in made:
        made["sinks"] = (made.pop("sink_k"), torch.randn(2, 2, 8))
    with pytest.raises(ValueError, match=message):
        exclusive_attention(**made)


MASKS = {
    "prefix": Mask.prefix(torch.tensor([3, 0])),
    "padding": Mask.padding(torch.arange(9)[None] < torch.tensor([[9], [6]])) & Mask.causal(),
    "window": Mask.window(3) & Mask.causal(),
    "documents": Mask.documents(torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2])) & Mask.causal(),
    "diag": Mask.causal(exclude_self=True),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_masks_go_through_every_backend_and_dtype_alike(backend, dtype, mask):
    chosen = MASKS[mask]
    visible = chosen.to_dense(2, 9, 9, "cpu")[:, 0].expand(2, 9, 9)
    compare(
        dtype,
        inputs(2, 9, 9, 4, 2, 8, 8),
        lambda q, k, v: exclusive_attention(q, k, v, mask=chosen, backend=backend),
        lambda q, k, v: loop_attention(q, k, v, visible=visible),
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strength_zero_is_plain_attention_bit_for_bit_on_every_backend(backend, dtype):
    q, k, v = (t.to(dtype) for t in inputs(2, 33, 33, 4, 2, 16, 16))
    zero, plain = (
        gradients(
            lambda q, k, v, s=s: exclusive_attention(q, k, v, causal=True, strength=s, backend=backend),
            (q, k, v),
            q,
        )
        for s in (0.0, None)
    )
    assert all(torch.equal(a, b) for a, b in zip(zero, plain, strict=True))
