"""The exclusion by its properties, in plain torch, C++ and Triton (interpreted where there is no GPU)."""

import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_oracle import EPS, assert_close, correlated

from xsa_core.attention import cpu_kernel, exclude, exclusive_attention, projection
from xsa_core.attention import projection_ops as ops

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class _Plain:
    """The plain torch version with the compiled kernels' signatures."""

    exclude = staticmethod(lambda y, v, f, s: projection.exclude_forward(y, v, f if s is None else s))

    @staticmethod
    def exclude_(y, v, f, s):
        z, c = projection.exclude_forward(y, v, f if s is None else s)
        y.copy_(z)
        return c

    @staticmethod
    def exclude_backward(g, z, v, c, f, s, restore):
        strength = f if s is None else s
        return *projection.exclude_adjoint(g, z, v, c, strength), projection.restore(z, v, c, strength)


def implementation(name):
    if name == "plain":
        return _Plain
    if name == "triton":
        pytest.importorskip("triton")
        return importlib.import_module("xsa_core.attention.kernels")
    if not cpu_kernel.ready():
        pytest.skip("no C++ compiler here")
    return torch.ops.xsa


def naive(y, v, s):
    """The definition in float64, heads repeated."""
    v = v.repeat_interleave(y.shape[2] // v.shape[2], dim=2)
    return y - s * (y * v).sum(-1, keepdim=True) / (v * v).sum(-1, keepdim=True) * v


def case(B, T, H, Hkv, D, dtype, *, seed=0, per_head=False):
    """y, v as strided views of one tensor, g, strength (B, T, H) or None, the number that stands for it."""
    whole = correlated(B, T, H + 2 * Hkv, D, seed=seed, shared=0.7).to(dtype).to(DEVICE)
    y, _, v = whole.split([H, Hkv, Hkv], dim=2)
    g = correlated(B, T, H, D, seed=seed + 1, shared=0.0).to(dtype).to(DEVICE)
    acc = projection.accumulation_dtype(dtype)
    strength = torch.linspace(-0.3, 1.2, H, dtype=acc, device=DEVICE).expand(B, T, H) if per_head else None
    return y, v, g, strength


SHAPES = [(2, 7, 4, 2, 24), (1, 3, 2, 2, 64), (2, 33, 6, 1, 32), (1, 1, 3, 3, 1), (1, 5, 4, 4, 128)]


@pytest.mark.parametrize("name", ["plain", "cpp", "triton"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "per_head"), [*zip(SHAPES, [True, False] * 3, strict=False), (SHAPES[0], False)]
)
def test_forward_and_adjoint_equal_float64_autograd(name, dtype, shape, per_head):
    impl = implementation(name)
    y, v, g, strength = case(*shape, dtype, per_head=per_head)
    z, c = impl.exclude(y, v, 0.8, strength)
    dy, dv, ds, restored = impl.exclude_backward(g, z, v, c, 0.8, strength, True)
    leaves = [y.double().requires_grad_(), v.double().requires_grad_()]
    leaves.append(
        (strength if per_head else torch.full_like(c, 0.8, dtype=torch.float64))
        .double()
        .clone()
        .requires_grad_()
    )
    expected = naive(leaves[0], leaves[1], leaves[2].unsqueeze(-1))
    expected.backward(g.double())
    # z reaches the adjoint rounded, which moves dv by eps |a| |z| / |v| per head of the group: the factor
    # covers it.
    size = 1 + (1 / v.double().norm(dim=-1)).max().item()
    assert_close([z, dy, restored], [expected.detach(), leaves[0].grad, y.double()], dtype, factor=4)
    assert_close([dv], [leaves[1].grad], dtype, factor=8 * size)
    if per_head:
        assert_close([ds], [leaves[2].grad], projection.accumulation_dtype(dtype), factor=shape[-1])


@pytest.mark.parametrize("name", ["plain", "cpp", "triton"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_in_place_equals_out_of_place(name, dtype):
    impl = implementation(name)
    y, v, _, strength = case(2, 9, 4, 2, 40, dtype, per_head=True)
    z, c = impl.exclude(y, v, 1.0, strength)
    target, kept = y.clone(), y.clone()
    assert torch.equal(impl.exclude_(target, v, 1.0, strength), c)
    assert torch.equal(target, z)
    assert torch.equal(y, kept)


@pytest.mark.parametrize("name", ["plain", "cpp", "triton"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", ["zero", "denormal", "smallest normal", "tiny", "huge"])
def test_extreme_values_stay_finite_and_exact(name, dtype, size):
    """A vector below the smallest normal number counts as zero; above, its direction is still exact."""
    impl = implementation(name)
    info = torch.finfo(dtype)
    for D in (24, 64):
        y, v, g, _ = case(1, 3, 2, 1, D, dtype)
        value = {"zero": 0.0, "denormal": info.smallest_normal / 8, "smallest normal": info.smallest_normal}
        value |= {"tiny": info.smallest_normal * 1e3, "huge": info.max / 8}
        v = torch.full_like(v, value[size])
        z, c = impl.exclude(y, v, 1.0, None)
        dy, dv, _, _ = impl.exclude_backward(g, z, v, c, 1.0, None, True)
        assert all(torch.isfinite(x).all() for x in (z, c, dy))
        if size in ("zero", "denormal"):
            assert torch.equal(z, y)
            assert torch.equal(dy, g)
            assert not c.any()
            assert not dv.any()
        else:
            ones = torch.ones_like(v).double()
            assert_close(
                [z, dy], [naive(y.double(), ones, 1.0), naive(g.double(), ones, 1.0)], dtype, factor=8
            )
        if size in ("zero", "denormal", "huge"):
            assert torch.isfinite(dv).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_output_is_orthogonal_to_own_value(dtype):
    y, v, _, _ = case(2, 9, 4, 2, 64, dtype)
    z = exclude(y, v).double()
    along = (z * v.double().repeat_interleave(2, dim=2)).sum(-1).abs()
    norms = y.double().norm(dim=-1) * v.double().norm(dim=-1).repeat_interleave(2, dim=2)
    assert (along <= 4 * EPS[dtype] * norms).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_excluding_twice_is_excluding_once(dtype):
    y, v, _, _ = case(2, 9, 4, 2, 64, dtype)
    once = exclude(y, v)
    assert_close([exclude(once, v)], [once.double()], dtype, factor=4)


@pytest.mark.parametrize("factor", [-1.0, 0.25, 1024.0])
def test_scale_and_sign_of_the_value_do_not_matter(factor):
    y, v, _, _ = case(2, 9, 4, 2, 64, torch.float32)
    assert_close([exclude(y, v * factor)], [exclude(y, v).double()], torch.float32, factor=2)


def test_strength_interpolates_and_overshoots():
    y, v, _, _ = case(1, 5, 2, 2, 16, torch.float64)
    full = y - exclude(y, v)
    for s in (0.0, 0.5, 2.0, -1.0):
        assert_close([y - exclude(y, v, s)], [s * full], torch.float64, factor=4)


@pytest.mark.parametrize("per_head", [False, True])
def test_gradcheck(per_head):
    y, v, _, _ = (x if x is None else x.cpu() for x in case(1, 3, 4, 2, 5, torch.float64))
    leaves = [y.clone().requires_grad_(), v.clone().requires_grad_()]
    if per_head:
        leaves.append(torch.tensor([0.1, 0.5, 1.0, 1.4], dtype=torch.float64, requires_grad=True))
    assert torch.autograd.gradcheck(exclude, leaves)


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_do_not_change_the_cpp_result(threads):
    implementation("cpp")
    y, v, g, _ = (x if x is None else x.cpu() for x in case(2, 300, 8, 2, 64, torch.float32))
    torch.set_num_threads(threads)
    z, c = torch.ops.xsa.exclude(y, v, 1.0, None)
    found = (z, c, *torch.ops.xsa.exclude_backward(g, z, v, c, 1.0, None, True))
    plain = (*_Plain.exclude(y, v, 1.0, None), *_Plain.exclude_backward(g, z, v, c, 1.0, None, True))
    keep = [i for i, x in enumerate(found) if x.numel()]
    assert_close([found[i] for i in keep], [plain[i].double() for i in keep], torch.float32, factor=32)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    B=st.integers(1, 3),
    T=st.integers(1, 9),
    Hkv=st.integers(1, 3),
    group=st.integers(1, 4),
    D=st.integers(1, 140),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_cpp_equals_plain_torch_for_any_shape(B, T, Hkv, group, D, dtype, seed):
    implementation("cpp")
    y, v, g, s = (x.cpu() for x in case(B, T, Hkv * group, Hkv, D, dtype, seed=seed, per_head=True))
    z, c = torch.ops.xsa.exclude(y, v, 1.0, s)
    plain_z, plain_c = _Plain.exclude(y, v, 1.0, s)
    assert_close([z], [plain_z.double()], dtype, factor=4)
    acc = projection.accumulation_dtype(dtype)
    assert_close([c], [plain_c.double()], acc, factor=4 * D)
    found = torch.ops.xsa.exclude_backward(g, z, v, c, 1.0, s, True)
    plain = _Plain.exclude_backward(g, z, v, c, 1.0, s, True)
    assert_close(found[::3], [x.double() for x in plain[::3]], dtype, factor=16)
    assert_close([found[2]], [plain[2].double()], acc, factor=16 * D)
    # The terms of dv may cancel; the bound is that of the largest of them.
    smallest = v.double().norm(dim=-1).min().clamp_min(1e-3).item()
    assert_close([found[1]], [plain[1].double()], dtype, factor=64 * group * (1 + D**0.5 / smallest))


def test_without_a_compiled_kernel_the_same_gradients_come(monkeypatch):
    y, v, g, s = (x.cpu() for x in case(2, 9, 4, 2, 32, torch.float32, per_head=True))

    def run():
        leaves = [y.clone().requires_grad_(), v.clone().requires_grad_(), s.clone().requires_grad_()]
        z = exclude(*leaves)
        z.backward(g)
        return [z.detach(), *(leaf.grad for leaf in leaves)]

    first = run()
    monkeypatch.setattr(ops, "compiled", lambda x: False)
    assert_close(run(), [x.double() for x in first], torch.float32, factor=64)


@pytest.mark.parametrize(
    ("y", "v", "message"),
    [((1, 2, 4, 8), (1, 2, 3, 8), "Hkv dividing H"), ((2, 4, 8), (2, 4, 8), "B, T, H, D")],
)
def test_wrong_shapes_are_refused(y, v, message):
    with pytest.raises(ValueError, match=message):
        exclude(torch.randn(y), torch.randn(v))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("strength", [0.0, 1.0])
def test_dtypes_without_arithmetic_are_refused(dtype, strength):
    x = torch.zeros(1, 2, 2, 4).to(dtype)
    with pytest.raises(ValueError, match="work in float64, float32, bfloat16 or float16, got torch"):
        exclude(x, x, strength)
    with pytest.raises(ValueError, match="float"):
        exclusive_attention(x, x, x, strength=strength)


@pytest.mark.parametrize("pair", [(torch.float32, torch.bfloat16), (torch.float16, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("strength", [0.0, 1.0])
def test_two_dtypes_are_refused_in_either_order(pair, strength):
    for first, second in (pair, pair[::-1]):
        y, v = torch.zeros(1, 2, 2, 4, dtype=first), torch.zeros(1, 2, 2, 4, dtype=second)
        with pytest.raises(ValueError, match=f"y is {first} and v is {second}; cast one of them"):
            exclude(y, v, strength)


def test_a_complex_strength_is_refused():
    y, strength = torch.randn(1, 2, 2, 4), torch.ones(2, dtype=torch.complex64)
    for call in (lambda: exclude(y, y, strength), lambda: exclusive_attention(y, y, y, strength=strength)):
        with pytest.raises(ValueError, match=r"must be real, got torch\.complex64"):
            call()


def test_mixed_dtypes_are_refused():
    with pytest.raises(ValueError, match="one dtype"):
        exclude(torch.randn(1, 2, 2, 4), torch.randn(1, 2, 2, 4).double())
