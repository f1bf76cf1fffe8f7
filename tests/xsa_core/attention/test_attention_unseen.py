"""A query row that sees nothing gives 0 and no gradient in every implementation; other rows are untouched."""

import dataclasses
import itertools

import pytest
import torch
from operator_oracle import assert_close, correlated, gradients
from torch import nn

from xsa_core import SelfAttention, probe
from xsa_core.attention import (
    BACKENDS,
    Mask,
    attention_with_lse,
    exclusive_attention,
)
from xsa_core.attention.kernel_pairs import PAIRS, aligned_bias, clear_unseen_
from xsa_core.attention.precision import bias_as
from xsa_core.attention.variants import VARIANTS, Call, build_variant

B, T, H, Hkv, D = 2, 6, 4, 2, 8
INF = float("inf")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def bias_with_empty_rows(dtype=torch.float64):
    """(B, H, T, T): row 0 sees nothing anywhere, row 4 nothing in head 1, row 5 only key 2."""
    bias = correlated(B, T, H, T, seed=4, shared=0.0).transpose(1, 2).contiguous()
    bias[:, :, 0] = -INF
    bias[:, 1, 4] = -INF
    bias[:, :, 5, :2] = bias[:, :, 5, 3:] = -INF
    return bias.to(dtype)


EMPTY = torch.zeros(B, T, H, dtype=torch.bool)
EMPTY[:, 0] = EMPTY[:, 4, 1] = True


def loop(q, k, v, bias, *sinks, strength=1.0):
    """Row by row, only over the keys that are seen; a row without any is left at zero."""
    rows = []
    for b, t, h in itertools.product(range(B), range(T), range(H)):
        g = h // (H // Hkv)
        seen = bias[b, h, t] > -INF
        logits, values = k[b, seen, g] @ q[b, t, h] * D**-0.5 + bias[b, h, t, seen], v[b, seen, g]
        if sinks:
            logits = torch.cat([logits, sinks[0][:, g] @ q[b, t, h] * D**-0.5])
            values = torch.cat([values, sinks[1][:, g]])
        y = torch.softmax(logits, dim=0) @ values if len(logits) else torch.zeros(D, dtype=torch.float64)
        own = v[b, t, g]
        rows.append(y - strength * (y @ own) / (own @ own) * own)
    return torch.stack(rows).view(B, T, H, D)


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("strength", [None, 0.4, 1.0])
@pytest.mark.parametrize("bias_gradient", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_output_and_gradients_equal_the_loop_over_seen_keys(
    backend, dtype, bias_gradient, strength, with_sinks
):
    """The flash kernel without a gradient of the bias, the math pair with one."""
    tensors = [correlated(B, T, h, D, seed=i, shared=0.5).to(dtype) for i, h in enumerate((H, Hkv, Hkv))]
    sinks = [correlated(3, 1, Hkv, D, seed=i)[:, 0].to(dtype) for i in (7, 8)] if with_sinks else []
    bias = bias_with_empty_rows(dtype)
    leaves = [*tensors, *([bias] if bias_gradient else []), *sinks]

    def call(run, given):
        def inner(q, k, v, *rest):
            b, kept = (rest[0], rest[1:]) if bias_gradient else (given, rest)
            return run(q, k, v, b, *kept)

        return inner

    def ours(q, k, v, b, *sink_kv):
        return exclusive_attention(q, k, v, bias=b, strength=strength, sinks=sink_kv or None, backend=backend)

    def slow(q, k, v, b, *sink_kv):
        return loop(q, k, v, b, *sink_kv, strength=strength or 0.0)

    weight = correlated(B, T, H, D, seed=9, shared=0.0).to(dtype)
    found = gradients(call(ours, bias), leaves, weight)
    expected = gradients(call(slow, bias.double()), [t.double() for t in leaves], weight.double())
    assert_close(found, expected, dtype)
    if not with_sinks:
        assert not found[0][EMPTY].any()
        assert not found[1][EMPTY].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias_gradient", [False, True])
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_the_log_sum_exp_of_nothing_is_minus_infinity_and_merges_as_nothing(backend, bias_gradient, dtype):
    tensors = [correlated(B, T, h, D, seed=i, shared=0.5).to(dtype) for i, h in enumerate((H, Hkv, Hkv))]
    bias = bias_with_empty_rows(dtype).requires_grad_(bias_gradient)
    _, lse = attention_with_lse(*tensors, bias=bias, backend=backend)
    assert torch.equal(lse.transpose(1, 2) == -INF, EMPTY)

    def merged(q, k, v):
        """Half with the bias, half without, joined by their log-sum-exp: all keys twice."""
        parts = [attention_with_lse(q, k, v, bias=x, backend=backend) for x in (bias, None)]
        total = torch.logaddexp(parts[0][1], parts[1][1])
        return sum(y * torch.exp(x - total).transpose(1, 2).unsqueeze(-1) for y, x in parts)

    def once(q, k, v):
        twice = [torch.cat([x, x], dim=1) for x in (k, v)]
        wide = torch.cat([bias.detach().double(), torch.zeros(B, H, T, T)], dim=-1)
        return exclusive_attention(q, *twice, bias=wide, strength=None, backend="reference")

    weight = correlated(B, T, H, D, seed=9, shared=0.0)
    expected = gradients(once, [t.double() for t in tensors], weight)
    assert_close(gradients(merged, tensors, weight), expected, dtype)


def noisy(kernel_forward):
    """A kernel that leaves NaN in the rows that see nothing, as CUDA kernels may."""

    def forward(q, k, v, bias, *options):
        y, lse, state = kernel_forward(q, k, v, bias, *options)
        rows = (bias == -INF).all(dim=-1)
        y.masked_fill_(rows.transpose(1, 2).unsqueeze(-1), torch.nan)
        return y, lse.masked_fill(rows, torch.nan), state

    return forward


@pytest.mark.parametrize("with_sinks", [False, True])
def test_the_xformers_pair_clears_what_its_kernel_leaves(monkeypatch, with_sinks):
    fmha = pytest.importorskip("xformers.ops").fmha
    inner = noisy(PAIRS["math"].forward)

    def forward(q, k, v, bias, p, scale):
        return inner(q, k, v, bias, False, scale, p)[:2]

    def backward(g, y, lse, q, k, v, bias, p, scale):
        assert all(torch.isfinite(x).all() for x in (g, y, lse))
        return PAIRS["math"].backward(g, q, k, v, y, lse, bias, (None, None), False, scale, p, False)[:3]

    monkeypatch.setattr(fmha, "memory_efficient_attention_forward_requires_grad", forward)
    monkeypatch.setattr(fmha, "memory_efficient_attention_backward", backward)
    able = dataclasses.replace(
        BACKENDS["xformers"], devices=("cpu",), dtypes=("float64",), unavailable=lambda: None
    )
    monkeypatch.setitem(BACKENDS, "xformers", able)
    tensors = [correlated(B, T, h, D, seed=i, shared=0.5) for i, h in enumerate((H, Hkv, Hkv))]
    tensors += [correlated(3, 1, Hkv, D, seed=i)[:, 0] for i in (7, 8)] if with_sinks else []

    def run(backend):
        def call(q, k, v, *sinks):
            options = {"bias": bias_with_empty_rows(), "sinks": sinks or None, "backend": backend}
            return exclusive_attention(q, k, v, **options)

        return gradients(call, tensors, tensors[0])

    assert_close(run("xformers"), run("reference"), torch.float64)


def test_clearing_touches_only_the_empty_rows_and_not_the_padding_of_the_kernel():
    y, lse = torch.ones(B, T, H, D), torch.ones(B, H, 32)
    lse[:, :, T:] = INF
    clear_unseen_(y, lse, bias_with_empty_rows())
    assert torch.equal(y == 0, EMPTY.unsqueeze(-1).expand_as(y))
    assert torch.equal(lse[:, :, :T] == 0, EMPTY.transpose(1, 2))
    assert (lse[:, :, T:] == INF).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_gives_finite_gradients_where_a_row_sees_nothing(variant):
    module = build_variant(variant, H, D).double()
    leaves = [
        correlated(B, T, h, D, seed=i, shared=0.5).requires_grad_() for i, h in enumerate((H, Hkv, Hkv))
    ]
    bias = bias_with_empty_rows().requires_grad_()
    y = module(*leaves, leaves[2], Call(bias=bias))
    y.sum().backward()
    assert torch.isfinite(y).all()
    assert not y[EMPTY].any()
    given = [x for x in (*leaves, bias, *module.parameters()) if x.grad is not None]
    assert len(given) >= 3
    assert all(torch.isfinite(x.grad).all() for x in given)


class _Biased(nn.Module):
    """A layer whose calls carry the bias, as those of converted models do."""

    def __init__(self, n_sinks):
        super().__init__()
        torch.manual_seed(0)
        self.attention = SelfAttention(H * D, H, Hkv, variant="xsa", n_sinks=n_sinks).double()
        plain = self.attention._call
        self.attention._call = lambda mask: dataclasses.replace(plain(mask), bias=bias_with_empty_rows())

    def forward(self, x):
        return self.attention(x)


@pytest.mark.parametrize("n_sinks", [0, 2])
def test_layer_and_probe_stay_finite(n_sinks):
    model = _Biased(n_sinks)
    x = correlated(B, T, 1, H * D, seed=3)[:, :, 0].requires_grad_()
    y = model(x)
    y.square().sum().backward()
    assert torch.isfinite(y).all()
    assert all(torch.isfinite(p.grad).all() for p in (x, *model.parameters()))
    (found,) = probe(model, x.detach())
    assert torch.isfinite(torch.tensor(found.diagonal_weight + found.cosine_output_value)).all()
    # Rows without any key give themselves no weight; row 5 sees only key 2.
    q, k, _ = model.attention._project(x.detach(), None)
    logits = torch.einsum("bthd,bshd->bhts", q, k.repeat_interleave(2, 2)) * D**-0.5 + bias_with_empty_rows()
    if n_sinks:
        sinks = torch.einsum("bthd,nhd->bhtn", q, model.attention.sink_k.repeat_interleave(2, 1)) * D**-0.5
        logits = torch.cat([logits, sinks.detach()], dim=-1)
    weights = torch.exp(logits) / torch.exp(logits).sum(-1, keepdim=True)
    own = torch.diagonal(weights[..., :T], dim1=-2, dim2=-1).nan_to_num(0.0).mean(dim=(0, 2))
    torch.testing.assert_close(torch.tensor(found.diagonal_weight, dtype=torch.float64), own)


def test_two_paddings_that_together_hide_everything_leave_a_query_of_another_length_with_nothing():
    """Own positions are visible only where queries have one: not for T = 3 queries and padding alone."""
    left = torch.arange(T)[None] < torch.tensor([[4], [T]])
    mask = Mask.padding(left) & Mask.padding(~left | torch.tensor([[False], [True]]))
    q, k, v = (correlated(B, n, 2, D, seed=i) for i, n in enumerate((3, T, T)))
    for backend in ("reference", "sdpa"):
        y, *grads = gradients(
            lambda q, k, v, b=backend: exclusive_attention(q, k, v, mask=mask, own_v=q, backend=b),
            (q, k, v),
            q,
        )
        assert not y[0].any()
        assert y[1].any()
        assert all(torch.isfinite(g).all() for g in grads)


def test_a_finite_bias_never_becomes_infinite_in_a_smaller_dtype():
    bias = torch.tensor([0.5, -1e30, -INF, torch.finfo(torch.float32).min], dtype=torch.float32)
    lowest = torch.finfo(torch.float16).min
    assert bias_as(bias, torch.float16).tolist() == [0.5, lowest, -INF, lowest]


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_nor_does_it_under_autocast_or_from_float64(backend):
    """A row of equal, very low numbers is a row of equal weights, not one that sees nothing."""
    q, k, v = (correlated(1, 4, 1, 8, seed=i).float() for i in range(3))
    plain = exclusive_attention(q * 0, k, v, strength=None, backend=backend)
    low = torch.full((4, 4), -1e30)
    wide = exclusive_attention(q * 0, k, v, bias=low.double() * 1e100, strength=None, backend=backend)
    torch.testing.assert_close(wide, plain)
    with torch.autocast("cpu", dtype=torch.float16):
        half = exclusive_attention(q * 0, k, v, bias=low, strength=None, backend=backend)
    torch.testing.assert_close(half.float(), plain, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("S", [5, 16, 48])
@pytest.mark.parametrize("shape", ["full", "row", "shifted"])
def test_the_efficient_kernels_get_dense_aligned_rows_in_their_dtype(S, shape):
    q = torch.zeros(B, T, H, D, dtype=torch.bfloat16)
    whole = torch.randn(B, H, T, S + 3)
    bias = {
        "full": whole[..., :S].contiguous(),
        "row": whole[:, :1, :, :1].expand(B, 1, T, S),
        "shifted": whole[..., 3:],
    }[shape]
    found = aligned_bias(bias, q, S)
    assert found.dtype == q.dtype
    assert found.stride(-1) == 1
    assert all(start % 16 == 0 for start in (*found.stride()[:-1], found.storage_offset()))
    assert torch.equal(found, bias.bfloat16().expand(B, H, T, S))
