"""The operator under torch.compile, autocast, checkpointing, and a second backward."""

import pytest
import torch
from operator_oracle import correlated, gradients
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from xsa_core.attention import Mask, attention_with_lse, exclude, exclusive_attention

PADDING = torch.arange(9)[None] < torch.tensor([[9], [5]])
CASES = {
    "plain": (lambda q, k, v: exclusive_attention(q, k, v, causal=True, strength=None), 0),
    "xsa": (lambda q, k, v: exclusive_attention(q, k, v, causal=True), 0),
    "learned": (
        lambda q, k, v, s: exclusive_attention(q, k, v, causal=True, strength=s[0, :, 0, 0].tanh()),
        1,
    ),
    "window": (lambda q, k, v: exclusive_attention(q, k, v, mask=Mask.window(3) & Mask.causal()), 0),
    "padding": (lambda q, k, v: exclusive_attention(q, k, v, mask=Mask.padding(PADDING)), 0),
    "diag": (lambda q, k, v: exclusive_attention(q, k, v, mask=Mask.causal(exclude_self=True)), 0),
    "sinks": (lambda q, k, v, a, b: exclusive_attention(q, k, v, causal=True, sinks=(a[0, :3], b[0, :3])), 2),
    "bias": (lambda q, k, v, b: exclusive_attention(q, k, v, bias=b[:, :1, :1, :9] * 1.0), 1),
    "lse": (lambda q, k, v: attention_with_lse(q, k, v, causal=True)[1].transpose(1, 2).unsqueeze(-1), 0),
    "exclude": (lambda q, k, v: exclude(q * 1.0, v) + k.mean(), 0),
}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tensors(case, dtype=torch.float32):
    made = [correlated(2, 9, h, 16, seed=i).to(dtype) for i, h in enumerate((4, 2, 2))]
    extra = {"learned": [correlated(1, 4, 1, 1, seed=5)], "bias": [correlated(2, 1, 1, 16, seed=6)]}
    extra["sinks"] = [correlated(1, 9, 2, 16, seed=i) for i in (7, 8)]
    return made + [x.to(dtype) for x in extra.get(case, [])]


@pytest.mark.parametrize("case", CASES)
def test_compiled_as_one_graph_gives_the_eager_numbers(case):
    function, inputs = CASES[case][0], tensors(case)
    weight = torch.linspace(0.5, 1.5, 16)
    eager = gradients(function, inputs, weight[: 1 if case == "lse" else 16])
    whole = torch.compile(function, fullgraph=True, backend="aot_eager")
    compiled = gradients(whole, inputs, weight[: 1 if case == "lse" else 16])
    eps = torch.finfo(torch.float32).eps
    for a, b in zip(compiled, eager, strict=True):
        torch.testing.assert_close(a, b, rtol=8 * eps, atol=8 * eps)


def test_new_lengths_do_not_recompile():
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(CASES["xsa"][0], fullgraph=True, backend=counter)
    for T in (8, 9, 17, 33, 64):
        q, k, v = (torch.randn(2, T, h, 16, requires_grad=True) for h in (4, 2, 2))
        run(q, k, v).sum().backward()
    assert counter.frame_count <= 2  # the first length, then any length


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_computes_in_its_dtype_and_returns_gradients_in_the_inputs_own(dtype):
    inputs = tensors("xsa")
    with torch.autocast("cpu", dtype=dtype):
        cast = gradients(CASES["xsa"][0], inputs, inputs[0])
    by_hand = gradients(CASES["xsa"][0], [x.to(dtype) for x in inputs], inputs[0])
    assert cast[0].dtype == dtype
    assert all(g.dtype == torch.float32 for g in cast[1:])
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(cast, by_hand, strict=True))


@pytest.mark.parametrize("case", ["xsa", "learned", "sinks"])
def test_checkpointing_changes_nothing(case):
    function, inputs = CASES[case][0], tensors(case)
    kept = gradients(function, inputs, inputs[0])
    again = gradients(lambda *t: checkpoint(function, *t, use_reentrant=False), inputs, inputs[0])
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))


@pytest.mark.parametrize("case", ["xsa", "learned", "lse", "exclude"])
def test_a_second_derivative_is_refused_with_the_backend_that_has_it(case):
    inputs = [x.requires_grad_() for x in tensors(case)]
    out = CASES[case][0](*inputs)
    (first,) = torch.autograd.grad(out.square().sum(), inputs[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="backend='reference'"):
        first.sum().backward()


def test_the_reference_has_a_second_derivative():
    q, k, v = (correlated(1, 3, 1, 3, seed=i).requires_grad_() for i in range(3))
    assert torch.autograd.gradgradcheck(
        lambda *t: exclusive_attention(*t, causal=True, backend="reference"), (q, k, v)
    )
