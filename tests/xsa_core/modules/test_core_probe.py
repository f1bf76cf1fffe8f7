"""Figure 1 statistics against explicit weights."""

import attention_oracle as oracle
import numpy as np
import pytest
import torch
from test_core_module import inputs, make_layer
from torch import nn

from xsa_core import GPT, GPTConfig, Mask, initialize, probe
from xsa_core.attention.probe import pair_cosines, probe_batches, token_statistics
from xsa_core.attention.variants import VARIANTS, Call, build_variant

EPS = np.finfo(np.float64).eps


class Layers(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x, mask=None):
        for layer in self.layers:
            x = x + layer(x, mask=mask)
        return x


def cosine(a, b, least=0.0):
    return a @ b / (max(np.sqrt(a @ a), least) * np.sqrt(b @ b))


def explicit(layer, x, visible, real):
    """The four statistics per head, from explicit weights, over real tokens and pairs of real tokens."""
    z, y, v, weights = oracle.heads_of(layer, x.numpy(), visible)
    B, T, H, _ = y.shape
    K = v.shape[2]
    kept = [(b, t) for b in range(B) for t in range(T) if real[b, t]]
    pairs = [(b, i, j) for b, i in kept for j in range(T) if real[b, j] and i != j]
    own = [[v[b, t, h // (H // K)] for h in range(H)] for b, t in kept]
    tokens = list(enumerate(kept))
    least = np.sqrt(EPS) * np.sqrt((y**2).sum(-1))
    return {
        "cosine_output_value": [
            np.mean([cosine(y[*bt, h], own[n][h]) for n, bt in tokens]) for h in range(H)
        ],
        "diagonal_weight": [np.mean([weights[b, h, t, t] for b, t in kept]) for h in range(H)],
        "cosine_values": [np.mean([cosine(v[b, i, g], v[b, j, g]) for b, i, j in pairs]) for g in range(K)],
        "cosine_head_value": [
            np.mean([cosine(z[*bt, h], own[n][h], least[*bt, h]) for n, bt in tokens]) for h in range(H)
        ],
    }


@pytest.mark.parametrize("kind", ["causal", "padding", "documents"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_statistics_equal_those_of_explicit_weights(variant, kind):
    layer = make_layer(n_kv_heads=2, variant=variant, causal=kind != "padding", n_sinks=1, rope_base=50.0)
    x = inputs(2, 7, 16)
    real = np.ones((2, 7), bool)
    mask, visible = None, oracle.causal(2, 7)
    if kind == "padding":
        real[1, 4:] = False
        mask, visible = (
            Mask.padding(torch.from_numpy(real)),
            np.broadcast_to(real[:, None], (2, 7, 7)) | np.eye(7, dtype=bool),
        )
    elif kind == "documents":
        ids = np.array([0, 0, 0, 1, 1, 1, 1])
        mask = Mask.documents(torch.from_numpy(ids)[None])
        visible = visible & (ids[:, None] == ids[None])
    (found,) = probe(Layers(layer), (x, mask))
    assert (found.layer, found.name, found.variant, found.tokens) == (0, "layers.0", variant, real.sum())
    for name, expected in explicit(layer, x, visible, real).items():
        # A token that sees only itself leaves rounding noise: eps of y, measured against sqrt(eps) of y.
        atol = 8 * np.sqrt(EPS) if name == "cosine_head_value" else 500 * EPS
        np.testing.assert_allclose(getattr(found, name), expected, rtol=0, atol=atol)


def test_exclusion_makes_the_passed_cosine_vanish_but_not_the_bias():
    layer = make_layer(variant="xsa", causal=True)
    means = probe(Layers(layer), inputs(2, 20, 16))[0].means()
    assert abs(means["cosine_head_value"]) < np.sqrt(EPS)
    assert abs(means["cosine_output_value"]) > 0.1


def test_batches_are_weighted_by_tokens():
    model = Layers(make_layer(causal=True), make_layer(causal=True, seed=3, variant="sa"))
    short, long = inputs(1, 4, 16), inputs(3, 9, 16, seed=2)
    both, a, b = probe_batches(model, [short, long]), probe(model, short), probe(model, long)
    for i in range(2):
        expected = (np.array(a[i].diagonal_weight) * 4 + np.array(b[i].diagonal_weight) * 27) / 31
        np.testing.assert_allclose(both[i].diagonal_weight, expected, rtol=100 * EPS)
        assert both[i].pairs == 12 + 3 * 72


def test_valid_tokens_can_be_named():
    model = Layers(make_layer(causal=True))
    x = inputs(1, 8, 16)
    valid = torch.arange(8)[None] < 5
    # The first five tokens of a causal layer do not see the rest.
    assert probe(model, x, valid=valid)[0].cosine_values == pytest.approx(
        probe(model, x[:, :5])[0].cosine_values, abs=100 * EPS
    )
    np.testing.assert_allclose(
        probe(model, x, valid=valid)[0].diagonal_weight,
        probe(model, x[:, :5])[0].diagonal_weight,
        rtol=100 * EPS,
    )


def test_probe_leaves_the_model_as_it_was():
    model = GPT(
        GPTConfig(vocab_size=11, n_layers=2, n_heads=2, d_model=16, max_seq_len=16, dropout=0.1)
    ).train()
    initialize(model, 0)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    seen = probe(model, {"tokens": torch.randint(0, 11, (2, 16))})
    assert [s.name for s in seen] == ["blocks.0.attention", "blocks.1.attention"]
    assert model.training
    assert all(b.attention.observer is None for b in model.blocks)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_identical_values_have_pair_cosine_one_and_opposite_ones_minus_one():
    v = torch.ones(1, 6, 1, 4, dtype=torch.float64)
    total, pairs = pair_cosines(v)
    assert total.item() / pairs == pytest.approx(1, abs=10 * EPS)
    total, pairs = pair_cosines(torch.cat((v[:, :1], -v[:, :1]), dim=1) * 3)
    assert total.item() / pairs == pytest.approx(-1, abs=10 * EPS)


def test_no_tensor_of_length_squared_is_made():
    layer = make_layer(16, 1, variant="xsa", causal=True, dtype=torch.float32)
    T = 3000
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as run:
        probe(Layers(layer), inputs(1, T, 16, dtype=torch.float32))
    largest = max(e.nbytes() for e in run.profiler.kineto_results.events() if e.name() == "[memory]")
    assert 0 < largest < T * T  # a boolean mask would have T * T bytes, weights four times as many


def test_model_without_attention_layers_is_an_error():
    with pytest.raises(ValueError, match="Linear has no SelfAttention"):
        probe(nn.Linear(2, 2), torch.zeros(1, 2))


SHAPES = [
    (),
    (7,),
    (1,),
    (7, 7),
    (7, 1),
    (1, 7),
    (4, 7, 7),
    (1, 1, 7),
    (2, 4, 7, 7),
    (2, 1, 1, 7),
    (1, 4, 7, 1),
]


def biased(shape, hide):
    """A call with a bias of this shape, and one with the same bias written out in full."""
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    if hide and shape[-1:] == (7,):
        bias[..., 2] = -torch.inf
    return Call(bias=bias), Call(bias=bias.expand(2, 4, 7, 7).contiguous())


@pytest.mark.parametrize("hide", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("variant", ["xsa", "mean_direction", "diag_masked"])
def test_a_bias_that_broadcasts_is_the_same_bias_written_out(variant, shape, hide):
    q, k, v = (
        torch.randn(2, 7, h, 8, generator=torch.Generator().manual_seed(h), dtype=torch.float64)
        for h in (4, 2, 2)
    )
    act = build_variant(variant, 4, 8).double()
    found, wanted = (act(q, k, v, v, call) for call in biased(shape, hide))
    torch.testing.assert_close(found, wanted, rtol=0, atol=200 * EPS)
    found, wanted = (token_statistics(q, k, v, found, call) for call in biased(shape, hide))
    torch.testing.assert_close(found, wanted, rtol=0, atol=500 * EPS)
