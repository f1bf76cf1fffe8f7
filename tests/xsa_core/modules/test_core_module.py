"""SelfAttention against loops in float64, and its properties."""

import attention_oracle as oracle
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_layers import EPS, TOLERANCE, inputs, make_layer

from xsa_core.attention.masks import Mask
from xsa_core.attention.variants import VARIANTS


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_layer_equals_loops(variant, causal):
    layer = make_layer(
        n_kv_heads=2,
        head_dim=6,
        variant=variant,
        causal=causal,
        rope_base=100.0,
        bias=True,
        n_sinks=2,
        qk_norm=True,
    )
    x = inputs(2, 7, 16)
    visible = (oracle.causal if causal else oracle.everything)(2, 7)
    torch.testing.assert_close(
        layer(x), torch.from_numpy(oracle.layer_output(layer, x.numpy(), visible)), **TOLERANCE
    )


@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 9)),
    groups=st.sampled_from([(1, 1), (2, 1), (3, 3), (4, 2), (6, 2)]),
    head_dim=st.sampled_from([2, 5, 8]),
    sinks=st.integers(0, 3),
    variant=st.sampled_from(sorted(VARIANTS)),
    causal=st.booleans(),
)
@settings(max_examples=25, deadline=None, derandomize=True)
def test_layer_equals_loops_for_any_shape(shape, groups, head_dim, sinks, variant, causal):
    (B, T), (H, K) = shape, groups
    layer = make_layer(10, H, n_kv_heads=K, head_dim=head_dim, n_sinks=sinks, variant=variant, causal=causal)
    x = inputs(B, T, 10)
    visible = (oracle.causal if causal else oracle.everything)(B, T)
    torch.testing.assert_close(
        layer(x), torch.from_numpy(oracle.layer_output(layer, x.numpy(), visible)), **TOLERANCE
    )


@pytest.mark.parametrize("rotary_dim", [2, 4, 6])
def test_partial_rotation_and_positions_equal_loops(rotary_dim):
    layer = make_layer(head_dim=6, rope_base=50.0, rotary_dim=rotary_dim, causal=True)
    x = inputs(2, 5, 16)
    positions = np.array([[3, 4, 5, 6, 7], [0, 2, 9, 11, 40]])
    expected = oracle.layer_output(layer, x.numpy(), oracle.causal(2, 5), positions=positions)
    torch.testing.assert_close(
        layer(x, positions=torch.from_numpy(positions)), torch.from_numpy(expected), **TOLERANCE
    )


def test_exclusion_uses_the_values_with_their_embedding():
    layer = make_layer(n_kv_heads=2)
    x, embedding = inputs(2, 6, 16), inputs(2, 6, 8, seed=5).view(2, 6, 2, 4)
    expected = oracle.layer_output(
        layer, x.numpy(), oracle.everything(2, 6), value_embedding=embedding.numpy()
    )
    torch.testing.assert_close(layer(x, value_embedding=embedding), torch.from_numpy(expected), **TOLERANCE)


def test_gate_acts_after_exclusion():
    class Gate(torch.nn.Module):
        def forward(self, x):
            return torch.sigmoid(x[..., None])  # B T C=H*D -> scale per head through a view

    layer = make_layer(d_model=4, n_heads=4, head_dim=3, causal=True)
    x = inputs(1, 5, 4)
    z, *_ = oracle.heads_of(layer, x.numpy(), oracle.causal(1, 5))
    gated = z * (1 / (1 + np.exp(-x.numpy())))[..., None]
    layer.output_gate = Gate()
    expected = gated.reshape(1, 5, -1) @ oracle.weights_of(layer)["out.weight"].T
    torch.testing.assert_close(layer(x), torch.from_numpy(expected), **TOLERANCE)


@pytest.mark.parametrize("variant", sorted(set(VARIANTS) - {"sa"}))
def test_every_variant_moves_the_output(variant):
    x = inputs(2, 8, 16)
    plain, other = (make_layer(variant=v, causal=True) for v in ("sa", variant))
    assert (plain(x) - other(x)).abs().max() > 1e-3 * plain(x).abs().max()


@pytest.mark.parametrize(
    "options",
    [
        {"qk_norm": True},
        {"n_sinks": 1},
        {"rope_base": 10.0},
        {"rope_base": 10.0, "rotary_dim": 2},
        {"causal": True},
        {"strength": 0.5},
        {"n_kv_heads": 2},
    ],
)
def test_every_option_moves_the_output(options):
    x = inputs(2, 8, 16)
    plain, other = make_layer(16), make_layer(16, **options)
    reference = make_layer(16, rope_base=10.0)(x) if "rotary_dim" in options else plain(x)
    assert (reference - other(x)).abs().max() > 1e-3 * plain(x).abs().max()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_heads_are_orthogonal_to_their_own_values(dtype):
    layer = make_layer(32, 4, n_kv_heads=2, causal=True, rope_base=100.0, n_sinks=1, dtype=dtype, spread=20.0)
    seen = []
    layer.observer = lambda q, k, v, heads, call: seen.append((v.double(), heads.double()))
    layer(inputs(2, 33, 32, dtype=dtype))
    ((v, heads),) = seen
    own = v.repeat_interleave(2, dim=2)
    # Rounding z to the dtype leaves at most eps/2 |z| along v; |z| <= |y| <= max |v_j|.
    bound = 2 * torch.finfo(dtype).eps * own.norm(dim=-1) * v.norm(dim=-1).max()
    assert ((heads * own).sum(-1).abs() <= bound).all()


def test_strength_zero_is_plain_attention_bit_for_bit():
    x = inputs(2, 9, 16, dtype=torch.float32).requires_grad_()
    results = []
    for options in ({"variant": "sa"}, {"variant": "xsa", "strength": 0.0}):
        layer = make_layer(dtype=torch.float32, causal=True, **options)
        y = layer(x)
        results.append((y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def saved_bytes(layer, x):
    """Bytes of distinct storages that one forward keeps for the backward, parameters left out."""
    kept = {}
    parameters = {p.untyped_storage().data_ptr() for p in layer.parameters()}

    def note(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = (storage.nbytes(), storage)  # held, so that no address is used twice
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        layer(x)
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exclusion_keeps_one_scalar_per_token_and_head(dtype):
    B, T, H = 2, 64, 4
    options = {"d_model": 64, "n_heads": H, "causal": True, "rope_base": 100.0, "dtype": dtype}
    x = inputs(B, T, 64, dtype=dtype)
    plain, exclusive = (saved_bytes(make_layer(variant=v, **options), x) for v in ("sa", "xsa"))
    assert exclusive - plain <= 4 * B * T * H


def test_single_token_gives_zero_and_finite_gradients():
    layer = make_layer(causal=True)
    x = inputs(2, 1, 16).requires_grad_()
    y = layer(x)
    assert y.abs().max() <= 20 * EPS * x.abs().max() * layer.out.weight.abs().sum()
    y.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in [x, *layer.parameters()])


@pytest.mark.parametrize("variant", VARIANTS)
def test_future_tokens_change_nothing_before(variant):
    layer = make_layer(variant=variant, causal=True, rope_base=100.0, n_sinks=1)
    x = inputs(1, 10, 16)
    changed = x.clone()
    changed[:, 6:] += 1
    before, after = layer(x), layer(changed)
    assert torch.equal(before[:, :6], after[:, :6])
    assert (before[:, 6:] != after[:, 6:]).any(dim=-1).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_padding_has_no_influence(variant):
    layer = make_layer(variant=variant, rope_base=100.0)
    x = inputs(2, 9, 16)
    real = torch.ones(2, 9, dtype=torch.bool)
    real[1, 6:] = False
    mask = Mask.padding(real)
    other = x.clone()
    other[1, 6:] = 7.0
    a, b = layer(x, mask=mask), layer(other, mask=mask)
    assert torch.equal(a[0], b[0])
    assert torch.equal(a[1, :6], b[1, :6])
    torch.testing.assert_close(a[1:, :6], layer(x[1:, :6]), **TOLERANCE)


@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_documents_equal_separate_sequences(variant):
    layer = make_layer(variant=variant, causal=True)
    x = inputs(1, 9, 16)
    ids = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1]])
    packed = layer(x, mask=Mask.documents(ids))
    separate = torch.cat((layer(x[:, :4]), layer(x[:, 4:])), dim=1)
    torch.testing.assert_close(packed, separate, **TOLERANCE)


def test_prefix_tokens_see_each_other():
    layer = make_layer(causal=True)
    x = inputs(1, 8, 16)
    visible = np.tril(np.ones((8, 8), bool))
    visible[:, :3] = True
    expected = oracle.layer_output(layer, x.numpy(), visible[None])
    torch.testing.assert_close(layer(x, mask=Mask.prefix(3)), torch.from_numpy(expected), **TOLERANCE)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_agree_with_finite_differences(variant):
    layer = make_layer(
        6, 2, n_kv_heads=1, head_dim=4, variant=variant, causal=True, rope_base=10.0, n_sinks=1
    )
    names = [name for name, _ in layer.named_parameters()]

    def run(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(run, (inputs(1, 4, 6).requires_grad_(), *layer.parameters()), atol=1e-6)


def test_autocast_gives_half_output_near_the_exact_one():
    x = inputs(2, 16, 32, dtype=torch.float32)
    layer = make_layer(32, 4, causal=True, rope_base=100.0, dtype=torch.float32, spread=20.0)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    exact = layer.double()(x.double())
    assert y.dtype == torch.bfloat16
    # Three products in a row, each with relative error of about one eps of its largest terms.
    assert (y.double() - exact).abs().max() <= 8 * torch.finfo(torch.bfloat16).eps * exact.abs().max()


def test_a_learned_strength_gets_the_exact_gradient_under_autocast():
    x = inputs(2, 16, 32, dtype=torch.float32)
    layer = make_layer(32, 4, variant="xsa_learned", causal=True, dtype=torch.float32, spread=20.0)
    weight = inputs(2, 16, 32, seed=4, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    (y.float() * weight).sum().backward()
    found = layer.variant.raw_strength.grad
    exact = make_layer(32, 4, variant="xsa_learned", causal=True, spread=20.0)
    exact.load_state_dict({name: value.double() for name, value in layer.state_dict().items()})
    (exact(x.double()) * weight.double()).sum().backward()
    wanted = exact.variant.raw_strength.grad
    assert found.dtype == torch.float32
    # The two projections and the attention before it round in bf16; sums over tokens and channels do not.
    assert (found - wanted).abs().max() <= 8 * torch.finfo(torch.bfloat16).eps * wanted.abs().max()
