"""The CUDA paths as far as they show without a device: every call fits its kernel; shapes, dtypes, layouts.

The engine of autograd asks the device, so the operators' forward and backward are called by hand.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from xsa_core.attention import Mask, attention_with_lse, exclude, exclusive_attention, fused, projection

B, T, H, Hkv, D = 2, 130, 4, 2, 64
CASES = {
    "causal": {"causal": True},
    "full": {},
    "strength": {"causal": True, "strength": 0.4},
    "plain": {"causal": True, "strength": None},
    "dropout": {"causal": True, "dropout_p": 0.1},
    "window": {"causal": True, "mask": Mask.window(17)},
    "diag": {"mask": Mask.causal(exclude_self=True)},
    "documents": {"causal": True, "mask": Mask.documents(torch.arange(T) // 50)},
}


class Context:
    """What an autograd function is given; every input wants its gradient."""

    def __init__(self, args):
        self.args, self.saved_tensors = args, ()
        self.needs_input_grad = [isinstance(x, torch.Tensor) for x in args]

    def save_for_backward(self, *tensors):
        self.saved_tensors = tensors


@pytest.fixture
def fake(monkeypatch):
    if torch.version.cuda is None:
        pytest.skip("this torch knows no CUDA")
    pytest.importorskip("triton")
    contexts.clear()

    def applied(function):
        def apply(*args):
            contexts.append((function, Context(args)))
            return function.forward(contexts[-1][1], *args)

        return apply

    for function in (fused._ExclusiveAttention, fused._AttentionWithLse, fused._Exclude):
        monkeypatch.setattr(function, "apply", applied(function))
    for name in ("exclude_forward", "exclude_adjoint", "restore"):
        monkeypatch.setattr(projection, name, None)  # the Triton kernels do this, not plain torch
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield lambda *shape, dtype: torch.empty(shape, device="cuda:0", dtype=dtype).requires_grad_()


contexts = []


def inputs(fake, dtype, D=D):
    """q, k and v as views of one projection."""
    return fake(B, T, H + 2 * Hkv, D, dtype=dtype).split([H, Hkv, Hkv], dim=2)


def check(*outputs):
    """The layout of the output and of every gradient, from one operator."""
    assert outputs[0].is_contiguous()
    ((function, context),) = contexts
    contexts.clear()
    with torch.no_grad():
        grads = function.backward(context, *(torch.empty_like(out) for out in outputs))
    assert len(grads) == len(context.args)
    for given, grad in zip(context.args, grads, strict=True):
        if isinstance(given, torch.Tensor):
            assert (grad.shape, grad.dtype, grad.device) == (given.shape, given.dtype, given.device)
        else:
            assert grad is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_every_call_fits_its_kernels(fake, case, dtype):
    q, k, v = inputs(fake, dtype)
    out = exclusive_attention(q, k, v, backend="sdpa", **CASES[case])
    assert (out.shape, out.dtype, out.device.type) == (q.shape, dtype, "cuda")
    check(out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(H, T, T), (1, 1, 1, T), (B, 1, T, 1)], ids=str)
def test_a_bias_with_its_gradient_fits(fake, dtype, bias_dtype, shape):
    q, k, v = inputs(fake, dtype)
    bias = fake(*shape, dtype=bias_dtype)
    check(exclusive_attention(q, k, v, bias=bias, backend="sdpa"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_sinks_strengths_odd_sizes_and_the_log_sum_exp_fit(fake, dtype):
    q, k, v = inputs(fake, dtype)
    sinks = fake(3, Hkv, D, dtype=dtype), fake(3, Hkv, D, dtype=dtype)
    strength = fake(H, dtype=torch.float32)
    options = {"causal": True, "sinks": sinks, "strength": strength, "backend": "sdpa"}
    check(exclusive_attention(q, k, v, **options))
    check(exclude(q, v, strength))
    for size in (20, 40, 256):
        narrow = inputs(fake, dtype, size)
        check(exclusive_attention(*narrow, causal=True, backend="sdpa"))
    own = fake(B, 5, Hkv, D, dtype=dtype)
    check(exclusive_attention(q[:, :5], k, v, own_v=own, causal=True, backend="sdpa"))
    y, lse = attention_with_lse(q, k, v, causal=True, backend="sdpa")
    assert (lse.shape, lse.dtype) == ((B, H, T), torch.float32)
    check(y, lse)
