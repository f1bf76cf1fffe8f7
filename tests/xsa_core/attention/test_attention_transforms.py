"""The operator under torch.compile, autocast, checkpointing, a second backward and torch.func."""

import pytest
import torch
from operator_oracle import correlated, gradients
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from xsa_core.attention import Mask, attention_with_lse, exclude, exclusive_attention

PADDING = torch.arange(9)[None] < torch.tensor([[9], [5]])
DOCUMENTS = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2])
WITH_ALL = ("backend='reference'", "xsa_core.attention.reference_exclude")  # of attention, of exclude alone
CASES = {
    "plain": (lambda q, k, v: exclusive_attention(q, k, v, causal=True, strength=None), 0),
    "xsa": (lambda q, k, v: exclusive_attention(q, k, v, causal=True), 0),
    "learned": (
        lambda q, k, v, s: exclusive_attention(q, k, v, causal=True, strength=s[0, :, 0, 0].tanh()),
        1,
    ),
    "window": (lambda q, k, v: exclusive_attention(q, k, v, mask=Mask.window(3) & Mask.causal()), 0),
    "padding": (lambda q, k, v: exclusive_attention(q, k, v, mask=Mask.padding(PADDING)), 0),
    "prefix": (lambda q, k, v: exclusive_attention(q, k, v, mask=Mask.prefix(PADDING.sum(1))), 0),
    "documents": (
        lambda q, k, v: exclusive_attention(q, k, v, mask=Mask.documents(DOCUMENTS) & Mask.causal()),
        0,
    ),
    "scale": (lambda q, k, v: exclusive_attention(q, k, v, causal=True, scale=-0.3), 0),
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


def narrow_value(q, k, v):
    return exclusive_attention(q, k, v[..., :8] * 1.0, causal=True)


def dropped(q, k, v):
    torch.manual_seed(3)
    return exclusive_attention(q, k, v, causal=True, dropout_p=0.3)


AUTOCAST = {
    **{case: CASES[case][0] for case in ("plain", "xsa", "sinks", "bias", "window", "lse", "exclude")},
    "narrow_value": narrow_value,
    "dropout": dropped,
    "reference": lambda q, k, v: exclusive_attention(q, k, v, causal=True, backend="reference"),
    "reference_lse": lambda q, k, v: attention_with_lse(q, k, v, causal=True, backend="reference")[1],
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", AUTOCAST)
def test_autocast_only_casts_the_inputs(case, dtype):
    """The same numbers as the call with inputs cast by hand: nothing inside computes in half precision."""
    leaves = [x.requires_grad_() for x in tensors(case)]
    by_hand = [x.detach().to(dtype).requires_grad_() for x in leaves]
    with torch.autocast("cpu", dtype=dtype):
        cast = AUTOCAST[case](*leaves)
    expected = AUTOCAST[case](*by_hand)
    assert cast.dtype == expected.dtype
    assert torch.equal(cast, expected)
    weight = torch.linspace(0.5, 1.5, cast.shape[-1]).expand_as(cast).to(cast.dtype)
    with torch.autocast("cpu", dtype=dtype, enabled="reference" not in case):
        found = torch.autograd.grad(cast, leaves, weight, allow_unused=True)
    wanted = torch.autograd.grad(expected, by_hand, weight, allow_unused=True)
    for a, b in zip(found, wanted, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == torch.float32
            assert torch.equal(a, b.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", ["reference", "sdpa", "exclude"])
def test_a_learned_strength_keeps_its_precision_under_autocast(backend, dtype):
    """It enters the sums in float32, and its gradient is not rounded to the half type on the way."""
    q, k, v = (x.requires_grad_() for x in tensors("xsa"))
    raw = torch.tensor([0.1, 0.30001, -0.7, 1.5], requires_grad=True)

    def run(q, k, v):
        s = torch.tanh(raw)
        if backend == "exclude":
            return exclude(q, v, s)
        return exclusive_attention(q, k, v, causal=True, strength=s, backend=backend)

    leaves = [q, v, raw] if backend == "exclude" else [q, k, v, raw]
    with torch.autocast("cpu", dtype=dtype):
        cast = run(q, k, v)
    by_hand = run(q.to(dtype), k.to(dtype), v.to(dtype))
    weight = torch.linspace(0.5, 1.5, 16).expand_as(cast).to(dtype)
    found = torch.autograd.grad(cast, leaves, weight)
    wanted = torch.autograd.grad(by_hand, leaves, weight)
    assert torch.equal(cast, by_hand)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a, b)
    exact = [x.detach().to(dtype).double().requires_grad_() for x in (q, k, v)]
    raw.grad = None
    if backend == "exclude":
        run(exact[0], None, exact[2]).backward(weight.double())
    else:
        run(*exact).backward(weight.double())
    # c and the products with the gradient of z are float32; y itself comes rounded to the half type.
    bound = 32 * torch.finfo(dtype).eps * raw.grad.abs().max()
    assert (found[-1] - raw.grad).abs().max() <= bound
    assert (found[-1].to(dtype).float() != found[-1]).any()


def test_the_log_sum_exp_is_in_float32_under_autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for backend in ("reference", "sdpa"):
            assert attention_with_lse(*tensors("lse"), backend=backend)[1].dtype == torch.float32


@pytest.mark.parametrize("case", ["xsa", "sinks", "bias", "reference"])
def test_autocast_compiles_as_one_graph(case):
    inputs = tensors(case)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        eager = AUTOCAST[case](*inputs)
        compiled = torch.compile(AUTOCAST[case], fullgraph=True, backend="aot_eager")(*inputs)
    assert torch.equal(eager, compiled)


def test_exclude_takes_mixed_dtypes_under_autocast():
    y, v = tensors("xsa")[0], tensors("xsa")[2]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = exclude(y.bfloat16(), v)
    assert torch.equal(found, exclude(y.bfloat16(), v.bfloat16()))


def test_shapes_can_be_tried_on_the_meta_device():
    q, _, v = (x.to("meta") for x in tensors("xsa"))
    assert exclude(q, v).shape == q.shape


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
    with pytest.raises(RuntimeError, match=f"second derivative; use {WITH_ALL[case == 'exclude']}"):
        first.sum().backward()


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(lambda y: f(y).sum())(x),
    "vmap": lambda f, x: torch.func.vmap(f)(torch.stack((x, x))),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "hessian": lambda f, x: torch.func.hessian(lambda y: f(y).sum())(x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("case", ["xsa", "learned", "lse", "exclude"])
def test_a_transform_is_refused_with_the_function_that_has_it(case, name):
    first, *rest = tensors(case)
    with pytest.raises(RuntimeError, match=f"torch.func.*; use {WITH_ALL[case == 'exclude']}") as caught:
        TRANSFORMS[name](lambda x: CASES[case][0](x, *rest), first)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("case", ["xsa", "learned", "lse", "exclude"])
def test_forward_mode_is_refused_with_the_function_that_has_it(case):
    first, *rest = tensors(case)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(first, torch.ones_like(first))
        with pytest.raises(RuntimeError, match=f"forward-mode.*; use {WITH_ALL[case == 'exclude']}"):
            CASES[case][0](dual, *rest)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_the_reference_has_every_transform(name):
    q, k, v = (correlated(1, 3, 1, 2, seed=i) for i in range(3))

    def attend(x):
        return exclusive_attention(x, k, v, causal=True, strength=0.5, backend="reference")

    found = TRANSFORMS[name](attend, q)
    if name == "vmap":
        assert torch.equal(found, torch.stack((attend(q), attend(q))))
        return
    jacobian = torch.autograd.functional.jacobian(attend, q)  # reverse mode, an output at a time
    wanted = {
        "grad": lambda: jacobian.sum((0, 1, 2, 3)),
        "jvp": lambda: (attend(q), (jacobian * q).sum((4, 5, 6, 7))),
        "jacrev": lambda: jacobian,
        "hessian": lambda: torch.autograd.functional.hessian(lambda x: attend(x).sum(), q),
    }[name]()
    torch.testing.assert_close(found, wanted, rtol=0, atol=64 * torch.finfo(torch.float64).eps)


def test_each_sequence_of_a_vmap_has_its_own_padding():
    q = correlated(2, 4, 1, 2, seed=0)
    real = torch.tensor([[True] * 4, [True, True, False, False]])

    def one(x, kept):
        mask = Mask.padding(kept[None])
        return exclusive_attention(*[x[None]] * 3, mask=mask, backend="reference")[0]

    whole = exclusive_attention(q, q, q, mask=Mask.padding(real), backend="reference")
    torch.testing.assert_close(torch.func.vmap(one)(q, real), whole)


def test_the_reference_has_a_second_derivative():
    q, k, v = (correlated(1, 3, 1, 3, seed=i).requires_grad_() for i in range(3))
    assert torch.autograd.gradgradcheck(
        lambda *t: exclusive_attention(*t, causal=True, backend="reference"), (q, k, v)
    )
