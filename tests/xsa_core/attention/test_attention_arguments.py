"""What a call may be given: any dtype of a bias, any scale, an empty batch; the rest is one clear line."""

import pytest
import torch
from operator_oracle import assert_close, causal_visible, gradients, loop_attention

from xsa_core import Mask, exclude, exclusive_attention
from xsa_core.attention import attention_with_lse

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def inputs(B=2, T=5, H=4, Hkv=2, D=8, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(B, T, h, D, generator=generator, dtype=torch.float64).to(dtype) for h in (H, Hkv, Hkv)
    ]


@pytest.mark.parametrize("T", [5, 16, 65])
@pytest.mark.parametrize("bias_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_bias_of_any_dtype_is_read_as_the_numbers_it_holds(dtype, bias_dtype, T):
    tensors = inputs(1, T, 2, 1, 16, dtype)
    bias = torch.randn(2, T, T, generator=torch.Generator().manual_seed(1)).to(bias_dtype)
    found = gradients(lambda q, k, v: exclusive_attention(q, k, v, bias=bias), tensors, torch.ones(()))
    exact = gradients(
        lambda q, k, v: loop_attention(q, k, v, bias=bias.double()),
        [x.double() for x in tensors],
        torch.ones(()),
    )
    assert_close(found, exact, dtype)
    learned = exclusive_attention(*tensors, bias=bias.clone().requires_grad_())
    assert_close([learned.detach()], exact[:1], dtype)


SCALES = [0.0, -0.0, -0.4, 1e-320, -1e-320, 0.4]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("case", ["plain", "sinks", "window", "strength"])
def test_any_finite_scale_gives_the_attention_of_its_logits(case, scale, dtype):
    B, T, window = 2, 17, 3
    tensors = inputs(B, T, dtype=dtype)
    sinks = [torch.randn(1, 2, 8, generator=torch.Generator().manual_seed(i)).to(dtype) for i in (1, 2)]
    visible = causal_visible(B, T, T)
    options, oracle = {"causal": True}, {}
    if case == "window":
        options["mask"] = Mask.window(window)
        visible = visible & (torch.arange(T)[:, None] - torch.arange(T) < window)
    elif case == "strength":
        options["strength"] = oracle["strength"] = 0.5

    def fused(q, k, v, *s):
        return exclusive_attention(q, k, v, scale=scale, sinks=s or None, **options)

    def loop(q, k, v, *s):
        return loop_attention(q, k, v, scale=scale, visible=visible, sinks=s or None, **oracle)

    tensors += sinks if case == "sinks" else []
    weight = torch.randn(B, T, 4, 8, generator=torch.Generator().manual_seed(3))
    found = gradients(fused, tensors, weight)
    assert_close(found, gradients(loop, [x.double() for x in tensors], weight), dtype)


@pytest.mark.parametrize("scale", SCALES)
def test_the_log_sum_exp_is_that_of_the_scaled_logits(scale):
    q, k, v = inputs(Hkv=4)
    logits = torch.einsum("bthd,bshd->bhts", q, k) * scale
    logits = logits.masked_fill(~causal_visible(2, 5, 5)[:, None], -torch.inf)
    y, lse = attention_with_lse(q, k, v, causal=True, scale=scale)
    exact = torch.logsumexp(logits, dim=-1)
    assert_close([lse, y], [exact, torch.einsum("bhts,bshd->bthd", logits.softmax(-1), v)], torch.float64)


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("case", ["sinks", "bias", "learned bias", "dropout", "values", "padding", "lse"])
def test_an_empty_batch_has_an_empty_output_and_zero_gradients(case, backend):
    q, k, v = (x.float().requires_grad_() for x in inputs(0))
    one = torch.ones(1, 2, 8, requires_grad=True)
    bias = torch.zeros(4, 5, 5, requires_grad=case == "learned bias")
    options = {
        "sinks": {"sinks": (one, one)},
        "bias": {"bias": bias},
        "learned bias": {"bias": bias},
        "dropout": {"dropout_p": 0.5},
        "padding": {"mask": Mask.padding(torch.ones(0, 5, dtype=torch.bool))},
    }.get(case, {})
    if case == "values":
        v = torch.ones(0, 5, 2, 16, requires_grad=True)
    if case == "lse":
        z = attention_with_lse(q, k, v, backend=backend)[1]
        assert z.shape == (0, 4, 5)
    else:
        z = exclusive_attention(q, k, v, backend=backend, **options)
        assert z.shape == (0, 5, 4, v.shape[3])
    z.sum().backward()
    assert q.grad.shape == q.shape
    learned = {"sinks": one, "learned bias": bias}.get(case)
    assert learned is None or (learned.grad == 0).all()


LEARNED = torch.ones((), requires_grad=True)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": LEARNED}, "scale must be a number, got a tensor; multiply q by a learned one"),
        ({"scale": torch.tensor(0.3)}, "scale must be a number"),
        ({"scale": float("nan")}, "scale must be a finite number, got nan"),
        ({"scale": -float("inf")}, "scale must be a finite number, got -inf"),
        ({"scale": "x"}, "scale must be a finite number, got 'x'"),
        ({"scale": True}, "scale must be a finite number, got True"),
        ({"strength": "a"}, "strength must be a finite number, or a tensor .* got 'a'"),
        ({"strength": [1.0]}, "strength must be a finite number, or a tensor .* got a list of 1"),
        ({"strength": float("inf")}, "strength must be a finite number.* got inf"),
        ({"strength": float("nan")}, "strength must be a finite number.* got nan"),
        ({"sinks": torch.ones(1, 2, 8)}, "sinks must be a pair .* got a tensor of shape"),
        ({"sinks": (torch.ones(1, 2, 8),)}, "sinks must be a pair .* got a tuple of 1"),
        ({"sinks": (torch.ones(2, 8), torch.ones(2, 8))}, "sinks must be a pair"),
        ({"sinks": (None, None)}, "sinks must be a pair"),
        ({"bias": [[0.0]]}, "bias must be a torch tensor, got a list of 1"),
        ({"own_v": 1.0}, "own_v must be a torch tensor, got 1.0"),
        ({"dropout_p": "0.1"}, "dropout_p must be in \\[0, 1\\), got '0.1'"),
        ({"dropout_p": float("nan")}, "dropout_p must be in \\[0, 1\\), got nan"),
        ({"causal": Mask.causal()}, "causal must be True or False, got a Mask; a Mask goes into mask="),
        ({"causal": torch.ones(5, 5)}, "causal must be True or False, got a tensor"),
    ],
    ids=lambda x: x if isinstance(x, str) else next(iter(x)),
)
def test_an_argument_of_another_kind_is_one_clear_line(options, message, backend):
    with pytest.raises(ValueError, match=message) as caught:
        exclusive_attention(*(x.float() for x in inputs()), backend=backend, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize(
    "wrong", [None, 1.0, "x", [[1.0]], torch.ones(2, 5, 4, 8).numpy()], ids=lambda x: type(x).__name__
)
def test_what_is_no_tensor_is_named(place, wrong):
    q, k, v = inputs(dtype=torch.float32)
    given = [q, k, v]
    given[place] = wrong
    name = "qkv"[place]
    for function in (exclusive_attention, attention_with_lse):
        with pytest.raises(ValueError, match=f"{name} must be a torch tensor"):
            function(*given)
    if place:
        return
    with pytest.raises(ValueError, match="y must be a torch tensor"):
        exclude(wrong, v)
    with pytest.raises(ValueError, match="v must be a torch tensor"):
        exclude(q, wrong)


@pytest.mark.parametrize("wrong", [None, "x", [1.0], float("nan"), float("inf")], ids=str)
def test_a_strength_that_is_no_number_is_refused(wrong):
    q, _, v = inputs()
    with pytest.raises(ValueError, match="strength must be a finite number"):
        exclude(q, v, wrong)
