"""Values far from one, and values that are no numbers: exact where it can be, visible where it cannot."""

import itertools

import pytest
import torch
from operator_oracle import EPS, correlated, gradients
from test_attention_projection import DEVICE, DTYPES, implementation, naive

from xsa_core.attention import exclude, exclusive_attention
from xsa_core.attention.projection import accumulation_dtype
from xsa_core.attention.reference import reference_exclude

# The interpreter of Triton computes with numpy, which remarks on what is meant here.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")

NAMES = ("plain", "cpp", "triton")
# Exponents of two of the magnitudes of y, v and g, and the exponent to which results are representable.
EXPONENTS = {
    torch.float32: ((-100, -50, 0, 50, 100), 120),
    torch.bfloat16: ((-100, -50, 0, 50, 100), 120),
    torch.float16: ((-6, 0, 6), 8),
    torch.float64: ((-600, -330, 0, 330, 600), 1010),
}


def scaled(x, exponents):
    """Row t of (1, T, H, D) times two to the exponents[t]: exact, and so is its inverse."""
    return torch.ldexp(x, torch.tensor(exponents, device=x.device).view(1, -1, 1, 1).to(x.dtype))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("D", "strength"), [(24, 1.0), (64, 1.0), (64, 0.4)])
def test_any_magnitude_is_exact_as_long_as_the_result_is_representable(name, D, dtype, strength):
    """The oracle uses no large numbers: z scales with y, dy with g, dv with |y| |g| / |v|."""
    impl = implementation(name)
    exponents, limit = EXPONENTS[dtype]
    combined = list(itertools.product(exponents, repeat=3))
    T = len(combined)
    y, v, g = (
        correlated(1, T, h, D, seed=i, shared=0.5).to(dtype).double().to(DEVICE)
        for i, h in enumerate((2, 1, 2))
    )
    leaves = [y.clone().requires_grad_(), v.clone().requires_grad_()]
    expected_z = naive(*leaves, strength)
    expected_z.backward(g)
    ey, ev, eg = zip(*combined, strict=True)
    given = [scaled(x, e).to(dtype) for x, e in ((y, ey), (v, ev), (g, eg))]
    z, c = impl.exclude(given[0], given[1], strength, None)
    dy, dv, _, restored = impl.exclude_backward(given[2], z, given[1], c, strength, None, True)

    def error(found, exponents, expected):
        back = scaled(found.double(), [-e for e in exponents])
        return (back - expected).abs().amax(dim=(0, 2, 3)) / expected.abs().amax(dim=(0, 2, 3))

    bound = 16 * EPS[dtype]
    assert (error(z, ey, expected_z.detach()) <= bound).all()
    assert (error(restored, ey, y) <= bound).all()
    assert (error(dy, eg, leaves[0].grad) <= bound).all()
    product = [a + b - n for a, n, b in combined]
    fits = torch.tensor(
        [
            all(abs(e) <= limit for e in (p, a - n, b - n))
            for p, (a, n, b) in zip(product, combined, strict=True)
        ]
    )
    assert fits.sum() > T / 5
    worst = error(dv, [p if ok else 0 for p, ok in zip(product, fits, strict=True)], leaves[1].grad)
    assert (worst[fits] <= 4 * bound).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("D", [24, 64], ids=["rows", "registers"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_value_that_is_no_number_shows_in_its_token_and_nowhere_else(name, D, dtype):
    """It has no direction: all that depends on it is NaN, forward and backward, for numbers and tensors."""
    impl = implementation(name)
    H, Hkv = 4, 2
    faults = [(torch.nan, 1), (torch.nan, 0), (torch.inf, 1), (torch.inf, 0), (-torch.inf, 1)]
    T = len(faults) + 1
    y, v, g = (correlated(1, T, h, D, seed=i).to(dtype).to(DEVICE) for i, h in enumerate((H, Hkv, H)))
    faulty = v.clone()
    touched = torch.zeros(1, T, Hkv, dtype=torch.bool, device=DEVICE)
    for t, (fault, others) in enumerate(faults):
        faulty[0, t, t % Hkv] *= others
        faulty[0, t, t % Hkv, (D - 3, 0, D // 2)[t % 3]] = fault
        touched[0, t, t % Hkv] = True
    heads = touched.repeat_interleave(H // Hkv, dim=2)
    per_head = torch.linspace(0.2, 1.0, H, dtype=accumulation_dtype(dtype), device=DEVICE).expand(1, T, H)
    for strength in (None, per_head):
        clean = impl.exclude(y, v, 1.0, strength)
        clean += impl.exclude_backward(g, clean[0], v, clean[1], 1.0, strength, True)
        found = impl.exclude(y, faulty, 1.0, strength)
        found += impl.exclude_backward(g, found[0], faulty, found[1], 1.0, strength, True)
        for i, (a, b) in enumerate(zip(found, clean, strict=True)):
            if i == 4 and strength is None:
                continue  # there is no gradient of a number
            where = touched if i == 3 else heads
            assert a[where].isnan().all(), i
            assert torch.equal(a[~where], b[~where]), i


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fault", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("function", [exclude, reference_exclude])
@pytest.mark.parametrize("form", ["number", "tensor"])
def test_the_differentiable_functions_show_it_too(function, form, fault, dtype):
    y, v = (correlated(1, 3, h, 16, seed=h).to(dtype) for h in (4, 2))
    v[0, 1, 1, 5] = fault
    strength = 0.5 if form == "number" else torch.linspace(0.2, 1.0, 4).to(dtype)
    z, dy, dv = gradients(lambda y, v: function(y, v, strength), (y, v), torch.ones_like(y))
    heads = torch.zeros(1, 3, 4, dtype=torch.bool)
    heads[0, 1, 2:] = True
    for x in (z, dy):
        assert x[heads].isnan().all()
        assert x[~heads].isfinite().all()
    assert dv[0, 1, 1].isnan().all()
    assert dv[:, 0].isfinite().all()


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("strength", ["one", "half", "tensor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fault", [torch.nan, torch.inf], ids=str)
def test_the_operator_does_not_hide_a_fault_in_the_values(backend, strength, dtype, fault):
    q, k, v = (correlated(1, 5, h, 16, seed=i).to(dtype) for i, h in enumerate((4, 2, 2)))
    v[0, 4, 1, 0] = fault
    s = {"one": 1.0, "half": 0.5, "tensor": torch.linspace(0.2, 1.0, 4)}[strength]
    z, dq, _, dv = gradients(
        lambda q, k, v: exclusive_attention(q, k, v, causal=True, strength=s, backend=backend),
        (q, k, v),
        torch.ones_like(q),
    )
    assert z[0, 4, 2:].isnan().all()
    assert dq[0, 4, 2:].isnan().any()
    assert dv[0, 4, 1].isnan().all()
    assert z[:, :, :2].isfinite().all()  # the other value head knows nothing of it
