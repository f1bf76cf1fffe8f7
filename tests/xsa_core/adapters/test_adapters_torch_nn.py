"""`torch.nn.MultiheadAttention`: every argument, its fused kernels, nested tensors, cross attention."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from xsa_core.adapters import convert, converted_layers, describe, set_strength

N, L, E, H = 2, 6, 12, 3
EPS = torch.finfo(torch.float64).eps


def attention(**options: Any) -> nn.MultiheadAttention:
    """In float64, with biases that are not zero."""
    torch.manual_seed(0)
    module = nn.MultiheadAttention(E, H, dtype=torch.float64, **options).eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "bias" in name:
                parameter.normal_()
    return module


def masks(kind: str) -> dict[str, Any]:
    """Masks that leave every query something to see."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.rand(L, L, generator=generator) < 0.4
    hidden.fill_diagonal_(False)
    padding = torch.zeros(N, L, dtype=torch.bool)
    padding[1, -2:] = True
    causal = torch.ones(L, L, dtype=torch.bool).triu(1)
    floats = torch.randn(L, L, generator=generator, dtype=torch.float64)
    per_head = torch.randn(N * H, L, L, generator=generator, dtype=torch.float64)
    return {
        "none": {},
        "bool": {"attn_mask": hidden},
        "float": {"attn_mask": floats},
        "per-head": {"attn_mask": per_head},
        "padding": {"key_padding_mask": padding},
        "float-padding": {"key_padding_mask": torch.zeros(N, L).double().masked_fill(padding, -3.0)},
        "both": {"attn_mask": causal, "key_padding_mask": padding},
        "causal": {"attn_mask": causal, "is_causal": True},
        "causal-and-padding": {"attn_mask": causal, "is_causal": True, "key_padding_mask": padding},
    }[kind]


KINDS = (
    "none",
    "bool",
    "float",
    "per-head",
    "padding",
    "float-padding",
    "both",
    "causal",
    "causal-and-padding",
)
OPTIONS = {
    "batch-first": {"batch_first": True},
    "sequence-first": {},
    "no-bias": {"bias": False, "batch_first": True},
    "bias-kv": {"add_bias_kv": True, "batch_first": True},
    "zero-attn": {"add_zero_attn": True},
    "bias-kv-and-zero-attn": {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("weights", [None, "average", "each"])
def test_every_argument_means_what_it_means_in_torch(kind: str, options: dict, weights: str | None) -> None:
    """At a strength that vanishes, output and weights are those of the original."""
    module = attention(**options)
    x = torch.randn(N, L, E, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x = x if module.batch_first else x.transpose(0, 1)
    call = masks(kind) | {"need_weights": weights is not None, "average_attn_weights": weights != "each"}
    if kind == "causal" and module.bias_k is None and not module.add_zero_attn and weights is None:
        call["attn_mask"] = torch.zeros(L, L, dtype=torch.bool)  # with the hint torch does not read it
    elif kind == "causal":
        call["is_causal"] = weights is not None  # torch's own hint would hide the extra keys
    expected, expected_weights = module(x, x, x, **call)
    convert(module, strength=1e-200)
    got, got_weights = module(x, x, x, **call)
    assert (got - expected).abs().max() <= 64 * EPS * expected.abs().max()
    if weights is None:
        assert got_weights is None
        assert expected_weights is None
    else:
        assert got_weights.shape == expected_weights.shape
        assert (got_weights - expected_weights).abs().max() <= 64 * EPS


def test_returned_weights_are_the_attention_and_the_output_is_exclusive() -> None:
    """z = y - (y.v) v / (v.v) from the returned weights, written out per head."""
    module = convert(attention(batch_first=True))
    x = torch.randn(1, L, E, dtype=torch.float64)
    heads = []
    layer = converted_layers(module)[""]
    layer.register_forward_hook(lambda m, args, out: heads.append((out, args[2])))
    _, weights = module(x, x, x, average_attn_weights=False)
    ((z, v),) = heads
    for head in range(H):
        for i in range(L):
            own = v[0, i, head]
            y = sum(weights[0, head, i, j] * v[0, j, head] for j in range(L))
            expected = y - (y @ own) / (own @ own) * own
            assert (z[0, i, head] - expected).abs().max() <= 64 * EPS * v.abs().max()


def test_one_sequence_without_a_batch_axis() -> None:
    module = attention()
    x = torch.randn(L, E, dtype=torch.float64)
    padding = torch.tensor([False] * 4 + [True] * 2)
    mask = torch.randn(H, L, L, dtype=torch.float64)
    padded = torch.zeros(L, dtype=torch.float64).masked_fill(padding, -torch.inf)
    call = {"attn_mask": mask, "key_padding_mask": padded, "average_attn_weights": False}
    expected = module(x, x, x, **call)
    got = convert(module, strength=1e-200)(x, x, x, **call)
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape
        assert (a - b).abs().max() <= 64 * EPS * b.abs().max()


def test_separate_projection_weights() -> None:
    """kdim and vdim make the value another tensor than query and key, of the same tokens."""
    module = attention(kdim=E, vdim=5, batch_first=True)
    x, value = torch.randn(N, L, E, dtype=torch.float64), torch.randn(N, L, 5, dtype=torch.float64)
    expected, _ = module(x, x, value)
    convert(module, strength=1e-200)
    assert (module(x, x, value)[0] - expected).abs().max() <= 64 * EPS * expected.abs().max()
    set_strength(module, 1.0)
    assert (module(x, x, value)[0] - expected).abs().max() > 1e-3


def test_positions_added_to_queries_and_keys_only_are_self_attention() -> None:
    module = attention(batch_first=True)
    x = torch.randn(N, L, E, dtype=torch.float64)
    placed = x + torch.randn(L, E, dtype=torch.float64)
    expected, _ = module(placed, placed, x)
    convert(module, strength=1e-200)
    assert (module(placed, placed, x)[0] - expected).abs().max() <= 64 * EPS * expected.abs().max()
    seen: list[tuple[Tensor, Tensor]] = []
    set_strength(module, 1.0)
    converted_layers(module)[""].register_forward_hook(lambda m, args, out: seen.append((out, args[3])))
    module(placed, placed, x)
    ((heads, own),) = seen
    assert ((heads * own).sum(-1).abs() <= 32 * EPS * own.norm(dim=-1) ** 2 + 32 * EPS).all()


@pytest.mark.parametrize("length", [L, 4])
def test_a_call_with_another_key_is_plain_cross_attention(length: int) -> None:
    module = attention(batch_first=True)
    x, memory = torch.randn(N, L, E, dtype=torch.float64), torch.randn(N, length, E, dtype=torch.float64)
    expected = module(x, memory, memory)
    convert(module)
    if length == L:  # the one case in which it might have been meant as self attention
        with pytest.warns(UserWarning, match="one tensor as query and key"):
            got = module(x, memory, memory)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            got = module(x, memory, memory)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert not torch.equal(module(x, x, x)[0], attention(batch_first=True)(x, x, x)[0])


def test_the_decoder_converts_self_attention_and_leaves_cross_attention_plain() -> None:
    layer = nn.TransformerDecoderLayer(E, H, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
    decoder = convert(nn.TransformerDecoder(layer, 2))
    kinds = {row.path: (row.kind, row.variant) for row in describe(decoder)}
    assert kinds["layers.1.self_attn"] == ("self", "xsa")
    assert kinds["layers.1.multihead_attn"] == ("cross", None)
    assert type(decoder.layers[1].multihead_attn) is nn.MultiheadAttention


def encoder(**options: Any) -> nn.TransformerEncoder:
    torch.manual_seed(2)
    layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True, dtype=torch.float64)
    return nn.TransformerEncoder(layer, 2, **options).eval()


@pytest.mark.parametrize("layers", ["all", "last:1"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_fused_kernel_of_the_encoder_does_not_bypass_the_layer(layers: str) -> None:
    """In evaluation without gradients torch computes an encoder layer from its weights in one call, and a
    padded batch as a nested tensor. Both must give what training code gives."""
    model = convert(encoder(), layers=layers)
    x = torch.randn(3, 7, 16, dtype=torch.float64)
    padding = torch.arange(7) >= torch.tensor([[7], [5], [2]])
    plain = encoder()
    for options in ({}, {"src_key_padding_mask": padding}):
        slow = model(x, **options)  # gradients keep torch off its kernel
        layers_hit: set[nn.Module] = set()
        handles = [
            m.register_forward_hook(lambda module, *_, hit=layers_hit: hit.add(module))
            for m in converted_layers(model).values()
        ]
        with torch.inference_mode():
            fast = model(x, **options)
            before = plain(x, **options)
        for handle in handles:
            handle.remove()
        assert len(layers_hit) == len(handles)
        kept = ~padding if options else torch.ones(3, 7, dtype=torch.bool)
        assert (fast[kept] - slow[kept]).abs().max() <= 256 * EPS * slow.abs().max()
        assert (fast[kept] - before[kept]).abs().max() > 1e-3


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_batch_is_that_of_its_sequences_one_by_one() -> None:
    model = convert(encoder()).layers[0]
    rows = [torch.randn(n, 16, dtype=torch.float64) for n in (5, 3, 1)]
    with torch.no_grad():
        nested = model(torch.nested.nested_tensor(rows)).unbind()
        for got, row in zip(nested, rows, strict=True):
            alone = model(row.unsqueeze(0))[0]
            assert (got - alone).abs().max() <= 256 * EPS * alone.abs().max()
    batch = torch.nested.nested_tensor(rows)
    with pytest.raises(ValueError, match="pad it"):
        model.self_attn(batch, batch, batch)


def test_padding_has_no_influence_on_what_is_not_padding() -> None:
    model = convert(encoder(enable_nested_tensor=False))
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    padding = torch.arange(7) >= torch.tensor([[7], [4]])
    noise = torch.where(padding[..., None], torch.randn_like(x) * 100, x)
    a, b = (model(y, src_key_padding_mask=padding)[~padding] for y in (x, noise))
    assert torch.equal(a, b)
    alone = model(x[1:, :4])[0]
    assert (a[7:] - alone).abs().max() <= 256 * EPS * alone.abs().max()


def test_dropout_acts_in_training_alone() -> None:
    module = convert(attention(dropout=0.5, batch_first=True))
    x = torch.randn(N, L, E, dtype=torch.float64)
    assert torch.equal(module(x, x, x)[0], module(x, x, x)[0])
    module.train()
    draws = torch.stack([module(x, x, x, need_weights=False)[0] for _ in range(2000)])
    assert not torch.equal(draws[0], draws[1])
    error = (draws.mean(0) - module.eval()(x, x, x)[0]).abs()
    assert (error <= 6 * draws.std(0) / 2000**0.5).all()  # the mean is the output without dropout


def test_masks_that_do_not_fit_are_refused_in_words() -> None:
    module = convert(attention(batch_first=True))
    x = torch.randn(N, L, E, dtype=torch.float64)
    with pytest.raises(ValueError, match="attn_mask of shape"):
        module(x, x, x, attn_mask=torch.zeros(L, L + 1, dtype=torch.bool))
    with pytest.raises(ValueError, match="key_padding_mask of shape"):
        module(x, x, x, key_padding_mask=torch.zeros(L, N, dtype=torch.bool))
    with pytest.raises(ValueError, match="is_causal"):
        module(x, x, x, is_causal=True)


@pytest.mark.parametrize("variant", ["diag_masked", "mean_direction", "random_direction", "head_norm", "sa"])
def test_the_controls_work_with_extra_keys_and_masks(variant: str) -> None:
    """Also where keys that belong to no token come before the tokens."""
    module = attention(add_bias_kv=True, add_zero_attn=True, batch_first=True)
    plain = copy.deepcopy(module)
    convert(module, variant=variant)
    x = torch.randn(N, L, E, dtype=torch.float64)
    call = masks("both") | {"average_attn_weights": False}
    out, weights = module(x, x, x, **call)
    expected, plain_weights = plain(x, x, x, **call)
    own = torch.diagonal(weights[..., :L], dim1=-2, dim2=-1)
    if variant == "diag_masked":
        assert (own == 0).all()
        assert (weights.sum(-1) - 1).abs().max() <= 16 * EPS
    else:
        assert (weights - plain_weights).abs().max() <= 64 * EPS
    same = (out - expected).abs().max() <= 64 * EPS * expected.abs().max()
    assert same == (variant == "sa")


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_of_separate_arguments_changes_no_gradient(
    batch_first: bool, use_reentrant: bool
) -> None:
    """Reentrant checkpointing hands over query, key and value as three tensors of one memory."""
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    model = convert(nn.MultiheadAttention(8, 2, batch_first=batch_first, dtype=torch.float64))
    x = torch.randn(3, 4, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 4, 8, dtype=torch.float64)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return model(q, k, v, need_weights=False)[0]

    wanted = [x, *model.parameters()]
    expected = torch.autograd.grad((attend(x, x, x) * weight).sum(), wanted)
    (checkpoint(attend, x, x, x, use_reentrant=use_reentrant) * weight).sum().backward()
    for parameter, gradient in zip(wanted, expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_a_detached_view_as_key_is_self_attention_and_gets_no_gradient() -> None:
    torch.manual_seed(0)
    model = convert(nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64))
    x = torch.randn(3, 4, 8, dtype=torch.float64, requires_grad=True)
    key = x.detach().requires_grad_()
    out = model(x, key, x)[0]
    torch.testing.assert_close(out, model(x, x, x)[0])
    both = torch.autograd.grad(out.square().sum(), (x, key))
    (whole,) = torch.autograd.grad(model(x, x, x)[0].square().sum(), x)
    assert both[1].any()
    torch.testing.assert_close(both[0] + both[1], whole)
