"""SelfAttention against loops in float64, and its properties."""

import attention_oracle as oracle
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xsa_core.attention.cache import LayerCache
from xsa_core.attention.masks import Mask
from xsa_core.attention.module import SelfAttention, select_layers
from xsa_core.attention.variants import VARIANTS
from xsa_core.gpt import GPT, GPTConfig
from xsa_core.initialization import initialize

EPS = torch.finfo(torch.float64).eps
TOLERANCE = {"rtol": 0, "atol": 200 * EPS}  # sums of some dozen terms of size about one, a few in a row


def make_layer(d_model=16, n_heads=4, seed=0, spread=40.0, dtype=torch.float64, **options):
    """A layer with logits of order one: the rule of initialisation leaves attention nearly uniform."""
    layer = SelfAttention(d_model, n_heads, **options).to(dtype)
    initialize(layer, seed)
    with torch.no_grad():
        for name, p in layer.named_parameters():
            if ("weight" in name and p.ndim == 2) or "sink" in name:
                p.mul_(spread)
            elif "raw_strength" in name:
                p.copy_(torch.linspace(-1.5, 2.0, p.numel()))
            elif "gain" in name:
                p.copy_(torch.linspace(0.5, 2.0, p.numel()).view_as(p))
    return layer


def inputs(B, T, C, seed=1, dtype=torch.float64):
    return torch.randn(B, T, C, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


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


@pytest.mark.parametrize("chunks", [[1] * 11, [11], [4, 4, 3], [1, 5, 5], [10, 1]])
@pytest.mark.parametrize("variant", VARIANTS)
def test_cache_in_any_chunks_equals_the_whole(variant, chunks):
    layer = make_layer(variant=variant, causal=True, rope_base=100.0, n_kv_heads=2, n_sinks=1)
    x = inputs(2, 11, 16)
    cache, out = LayerCache(capacity=16), []
    with torch.no_grad():
        for piece in x.split(chunks, dim=1):
            out.append(layer(piece, cache=cache))
        torch.testing.assert_close(torch.cat(out, dim=1), layer(x), **TOLERANCE)


def test_the_cache_refuses_to_drop_gradients():
    layer, x = make_layer(causal=True), inputs(1, 3, 16)
    with pytest.raises(ValueError, match="keeps no gradients"):
        layer(x, cache=LayerCache(capacity=3))
    with torch.no_grad():
        assert layer(x, cache=LayerCache(capacity=3)).shape == x.shape


@torch.no_grad()
def test_cache_beyond_its_capacity_is_refused():
    layer = make_layer(causal=True)
    cache = LayerCache(capacity=3)
    layer(inputs(1, 3, 16), cache=cache)
    with pytest.raises(ValueError, match="holds 3 positions, 4 are needed"):
        layer(inputs(1, 1, 16), cache=cache)
    with pytest.raises(ValueError, match="cannot cut"):
        cache.truncate(5)


def test_cache_can_be_cut_and_reordered():
    layer = make_layer(causal=True, rope_base=100.0)
    x = inputs(3, 8, 16)
    cache = LayerCache(capacity=8)
    with torch.no_grad():
        layer(x[:, :6], cache=cache)
        cache.truncate(4)
        cache.reorder(torch.tensor([2, 0]))
        again = layer(x[[2, 0], 4:], cache=cache)
        torch.testing.assert_close(again, layer(x)[[2, 0], 4:], **TOLERANCE)


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


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("all", {0, 1, 2, 3}),
        ("none", set()),
        ("first:2", {0, 1}),
        ("last:1", {3}),
        ("first:0", set()),
        ([0, -1], {0, 3}),
        ((), set()),
    ],
)
def test_layer_selection(layers, expected):
    assert select_layers(layers, 4) == expected


@pytest.mark.parametrize("layers", ["half", "first:", "first:5", "last:-1", [4], [-5], ["all"], [True]])
def test_wrong_layer_selection_is_one_clear_line(layers):
    with pytest.raises(ValueError, match="layers") as caught:
        select_layers(layers, 4)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"d_model": 10},
        {"n_kv_heads": 3},
        {"rope_base": 10.0, "rotary_dim": 3},
        {"variant": "xxa"},
        {"variant": "sa", "strength": 0.5},
        {"strength": float("nan")},
    ],
)
def test_wrong_options_are_one_clear_line(options):
    with pytest.raises(ValueError, match=r"\w+") as caught:
        SelfAttention(**({"d_model": 12, "n_heads": 4} | options))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "flash"}, "unknown attention backend 'flash'; use 'auto' or one of reference"),
        ({"backend": None}, "unknown attention backend None"),
        ({"dropout": 1.5}, r"dropout must be in \[0, 1\), got 1.5"),
        ({"dropout": -1}, r"dropout must be in \[0, 1\), got -1"),
        ({"dropout": 0.1, "n_sinks": 1}, "dropout cannot be combined with n_sinks: set one of them to 0"),
        ({"n_sinks": -1}, "n_sinks must be an integer of 0 or more, got -1"),
        ({"n_sinks": 1.0}, "n_sinks must be an integer"),
        ({"rope_base": 0.0}, "rope_base must be a positive number"),
        ({"rope_base": -1.0}, "rope_base must be a positive number"),
        ({"rope_base": float("nan")}, "rope_base must be a positive number"),
        ({"rotary_dim": 2}, "rotary_dim needs rope_base"),
        ({"n_heads": 0}, "n_heads must be a positive integer, got 0"),
        ({"n_kv_heads": 0}, "n_kv_heads must be a positive integer, got 0"),
        ({"head_dim": 0}, "head_dim must be a positive integer, got 0"),
        ({"head_dim": -8}, "head_dim must be a positive integer, got -8"),
        ({"head_dim": 8.0}, "head_dim must be a positive integer, got 8.0"),
        ({"d_model": 0}, "d_model must be a positive integer, got 0"),
    ],
    ids=str,
)
def test_a_size_or_option_that_cannot_be_is_refused_when_the_layer_is_made(options, message):
    with pytest.raises(ValueError, match=message):
        SelfAttention(**({"d_model": 12, "n_heads": 4} | options))


@pytest.mark.parametrize("layers", [None, 3, 0.5])
def test_layers_of_another_kind_are_one_clear_line(layers):
    with pytest.raises(ValueError, match=r"layers .* not understood: expected"):
        select_layers(layers, 4)


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (torch.ones(7, 16), {}, r"expected x \(B, T, C\) = \(B, T, 16\), got \(7, 16\)"),
        (torch.ones(2, 7, 15), {}, "expected x"),
        (torch.ones(2, 7, 16), {"positions": torch.arange(5)}, r"positions must be .* = \(2, 7\), got"),
        (torch.ones(2, 7, 16), {"positions": torch.zeros(2, 7)}, "positions must be integers"),
        (torch.ones(2, 7, 16), {"positions": [0, 1]}, "positions must be integers"),
        (torch.ones(2, 7, 16), {"value_embedding": torch.ones(2, 7, 3, 4)}, "value_embedding must be"),
        (torch.ones(2, 7, 16), {"value_embedding": torch.ones(1, 2, 7, 2, 4)}, "value_embedding must be"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_inputs_of_another_shape_are_one_clear_line(x, options, message):
    layer = make_layer(n_kv_heads=2, rope_base=10.0, dtype=torch.float32)
    with pytest.raises(ValueError, match=message):
        layer(x, **options)


FAILING = {
    "mask": lambda x: {"x": x, "mask": Mask.padding(torch.ones(2, 2, dtype=torch.bool))},
    "no mask": lambda x: {"x": x, "mask": torch.ones(2, 9, dtype=torch.bool)},
    "batch": lambda x: {"x": x[:1]},
    "dtype": lambda x: {"x": x.float()},
    "width": lambda x: {"x": x[..., 1:]},
    "room": lambda x: {"x": x.repeat(1, 9, 1)},
    "gradient": lambda x: {"x": x.clone().requires_grad_()},
    "observer": lambda x: {"x": x},
}


@pytest.mark.parametrize("depth", ["layer", "model"])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("failure", FAILING)
def test_a_call_that_fails_leaves_the_cache_as_it_was(failure, first, depth):
    options = {"n_heads": 4, "d_model": 16, "rope_base": 50.0}
    if depth == "model":
        model = GPT(GPTConfig(vocab_size=5, n_layers=3, max_seq_len=12, **options)).double().eval()
        initialize(model, 0)
        layer, cache = model.blocks[1].attention, model.make_cache()

        def run(x, **given):
            return model.hidden(embeddings=x, **given)
    else:
        layer = run = make_layer(causal=True, **options)
        cache = LayerCache(12)
    x = inputs(2, 9, 16)
    with torch.no_grad():
        whole = run(x)
        seen = 0 if first else 5
        if not first:
            run(x[:, :5], cache=cache)

        def broken(*given):
            raise RuntimeError("an observer that fails")

        layer.observer = broken if failure == "observer" else None
        given = FAILING[failure](x[:, seen:])
    before = len(cache)
    # An empty cache takes any batch and, in a single layer, any dtype that the layer takes.
    if not (failure == "batch" and first):
        with torch.set_grad_enabled(failure == "gradient"), pytest.raises((ValueError, RuntimeError)):
            run(given.pop("x"), cache=cache, **given)
    assert len(cache) == before
    layer.observer = None
    with torch.no_grad():
        torch.testing.assert_close(run(x[:, seen:], cache=cache), whole[:, seen:], **TOLERANCE)


def test_a_cache_keeps_to_one_dtype_until_it_is_empty():
    x = torch.randn(1, 2, 2, 4)
    cache = LayerCache(4)
    cache.append(x, x)
    with pytest.raises(ValueError, match=r"holds torch\.float32, the new tokens are torch\.bfloat16; decode"):
        cache.append(x.bfloat16(), x.bfloat16())
    with pytest.raises(ValueError, match=r"holds heads \(2, 4\) on cpu, got \(2, 8\) on cpu"):
        cache.append(torch.ones(1, 1, 2, 8), torch.ones(1, 1, 2, 8))
    cache.truncate(0)
    for again in (x.bfloat16(), x.repeat(3, 1, 1, 1), x[:, :, :1]):
        assert torch.equal(cache.append(again, again)[1], again)
        cache.truncate(0)


def test_a_cache_filled_in_inference_mode_says_so():
    x, cache = torch.ones(1, 2, 2, 4), LayerCache(4)
    with torch.inference_mode():
        cache.append(x, x)
    with pytest.raises(ValueError, match=r"filled under torch\.inference_mode"):
        cache.append(x, x)
    with torch.inference_mode():
        assert cache.append(x, x)[0].shape[1] == 4
