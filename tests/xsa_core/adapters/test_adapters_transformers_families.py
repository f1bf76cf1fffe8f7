"""Conversion of one tiny model per family of transformers."""

import copy
import functools

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")
from transformers_zoo import FAMILIES, build, inputs, output  # noqa: E402

from xsa_core.adapters import convert, converted_layers, describe, revert, set_strength  # noqa: E402

EPS = torch.finfo(torch.float32).eps
EVERY = pytest.mark.parametrize("name", FAMILIES)


@functools.cache
def plain(name: str) -> nn.Module:
    """A model that no test changes."""
    return build(name)


@functools.cache
def converted(name: str) -> nn.Module:
    """The converted twin, which no test changes for good."""
    return convert(copy.deepcopy(plain(name)))


@functools.cache
def outputs(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain and exclusive output."""
    with torch.no_grad():
        return output(plain(name), inputs(name)), output(converted(name), inputs(name))


def closeness(like: torch.Tensor, layers: int = 8) -> float:
    """What rounding leaves after a few layers: each contributes a few eps of the largest number."""
    return 64 * layers * EPS * max(1.0, like.abs().max().item())


@EVERY
def test_every_self_attention_layer_is_converted_and_no_other(name):
    rows = describe(converted(name))
    family = FAMILIES[name]
    assert [r.kind for r in rows].count("self") == len(converted_layers(converted(name))) == family.layers
    assert [r.kind for r in rows].count("cross") == len(rows) - family.layers == family.cross


@EVERY
def test_names_and_shapes_of_parameters_are_those_of_the_original(name):
    before = {n: p.shape for n, p in plain(name).named_parameters()}
    assert {n: p.shape for n, p in converted(name).named_parameters()} == before


@EVERY
def test_strength_zero_is_the_original_bit_for_bit(name):
    model = set_strength(copy.deepcopy(converted(name)), 0.0)
    with torch.no_grad():
        assert torch.equal(output(model, inputs(name)), outputs(name)[0])


@EVERY
def test_a_reverted_model_is_the_original(name):
    model = revert(copy.deepcopy(converted(name)))
    with torch.no_grad():
        assert torch.equal(output(model, inputs(name)), outputs(name)[0])
    assert [type(m) for m in model.modules()] == [type(m) for m in plain(name).modules()]
    assert model.config.to_dict() == plain(name).config.to_dict()
    assert model.config._attn_implementation == plain(name).config._attn_implementation


@EVERY
def test_output_differs_from_the_original(name):
    before, after = outputs(name)
    assert (after - before).abs().max() > 0.01 * before.abs().max()


@EVERY
def test_every_head_is_orthogonal_to_its_own_value(name):
    model = copy.deepcopy(converted(name))
    seen = []

    def observe(q, k, v, own_v, heads, call):
        own = own_v.repeat_interleave(heads.shape[2] // own_v.shape[2], dim=2)
        size = heads.norm(dim=-1) * own.norm(dim=-1)
        # A token that sees only itself has nothing left but rounding: compare with the size of the values.
        noise = 32 * EPS * own.norm(dim=-1) * v.norm(dim=-1).amax()
        seen.append(bool(((heads * own).sum(-1).abs() <= 32 * EPS * size + noise).all()))

    for exclusion in converted_layers(model).values():
        exclusion.observer = observe
    with torch.no_grad():
        output(model, inputs(name))
    assert seen == [True] * FAMILIES[name].layers


@EVERY
def test_gradients_reach_every_parameter(name):
    model = copy.deepcopy(converted(name))
    reference = copy.deepcopy(plain(name))
    for m in (model, reference):
        output(m, inputs(name)).square().mean().backward()
    for (path, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        if q.grad is None:
            assert p.grad is None, path
        elif q.grad.abs().max() > 0:
            assert p.grad is not None, path
            assert p.grad.abs().max() > 0, path
            assert torch.isfinite(p.grad).all(), path


@EVERY
def test_explicit_and_fused_attention_agree(name):
    if FAMILIES[name].implementation == "eager":
        pytest.skip("this family has explicit attention only")
    model = copy.deepcopy(converted(name))
    expected = outputs(name)[1]
    for implementation in ("xsa_eager", "xsa_flash"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            difference = (output(model, inputs(name)) - expected).abs().max()
        assert difference < closeness(expected), implementation


@EVERY
def test_a_converted_model_takes_plain_weights_and_a_plain_one_refuses_converted_ones(name):
    model = copy.deepcopy(converted(name))
    model.load_state_dict(plain(name).state_dict(), strict=True)
    with pytest.raises(RuntimeError, match="exclusion"):
        copy.deepcopy(plain(name)).load_state_dict(model.state_dict(), strict=True)


HEAD = 8  # channels of a head in every model of the zoo


def values_of(projected, layout):
    """Values `B T Hkv D` in what a projection gives."""
    if layout == "interleaved":  # q, k and v of one head side by side
        return projected.unflatten(-1, (-1, 3 * HEAD))[..., 2 * HEAD :]
    heads = projected.unflatten(-1, (-1, HEAD))
    return heads[..., 2 * heads.shape[-2] // 3 :, :] if layout == "thirds" else heads


class HookedExclusion:
    """Hooks that subtract the own value between attention and the output projection."""

    def __init__(self, attention, value, out, layout):
        self.layout, self.values = layout, None
        getattr(attention, value).register_forward_hook(self.keep)
        getattr(attention, out).register_forward_pre_hook(self.remove)

    def keep(self, module, args, projected):
        self.values = values_of(projected, self.layout)

    def remove(self, module, args):
        y = args[0].unflatten(-1, (-1, HEAD))
        v = self.values.repeat_interleave(y.shape[-2] // self.values.shape[-2], dim=-2)
        z = y - (y * v).sum(-1, keepdim=True) / v.square().sum(-1, keepdim=True) * v
        return (z.flatten(-2),)


# Family -> (end of the path of its self attention, projection of values, output projection, layout).
PROJECTIONS = {
    "llama": ("self_attn", "v_proj", "o_proj", "values"),
    "qwen3": ("self_attn", "v_proj", "o_proj", "values"),
    "gemma2": ("self_attn", "v_proj", "o_proj", "values"),
    "gpt_neox": ("attention", "query_key_value", "dense", "interleaved"),
    "gpt2": ("attn", "c_attn", "c_proj", "thirds"),
    "opt": ("self_attn", "v_proj", "out_proj", "values"),
    "clip": ("self_attn", "v_proj", "out_proj", "values"),
    "wav2vec2": ("attention", "v_proj", "out_proj", "values"),
    "t5": ("SelfAttention", "v", "o", "values"),
    "whisper": ("self_attn", "v_proj", "out_proj", "values"),
}


@pytest.mark.parametrize("name", PROJECTIONS)
def test_output_is_that_of_hooks_on_the_projections(name):
    """In float64, but for what the models themselves compute in float32."""
    end, value, out, layout = PROJECTIONS[name]
    model = copy.deepcopy(plain(name)).double()
    exclusive = convert(copy.deepcopy(model))
    attentions = [m for path, m in model.named_modules() if path.endswith(end) and hasattr(m, out)]
    assert len(attentions) == FAMILIES[name].layers
    for attention in attentions:
        HookedExclusion(attention, value, out, layout)
    exact = {k: v.double() if v.is_floating_point() else v for k, v in inputs(name).items()}
    with torch.no_grad():
        expected, got = output(model, exact), output(exclusive, exact)
    assert (got - expected).abs().max() < closeness(expected)


@pytest.mark.parametrize("name", [n for n, f in FAMILIES.items() if f.cross])
def test_cross_attention_computes_what_it_did(name):
    rows = [r for r in describe(converted(name)) if r.kind == "cross"]
    model, original = copy.deepcopy(converted(name)), plain(name)
    calls = {}
    for row in rows:
        module = model.get_submodule(row.path)
        assert type(module) is type(original.get_submodule(row.path))
        module.register_forward_hook(
            lambda m, args, kwargs, out, path=row.path: calls.update({path: (args, kwargs, out)}),
            with_kwargs=True,
        )
    with torch.no_grad():
        model(**inputs(name), use_cache=False)
        for path, (args, kwargs, out) in calls.items():
            again = original.get_submodule(path)(*args, **kwargs)
            assert torch.equal(out[0], again[0])
    assert len(calls) == FAMILIES[name].cross


@pytest.mark.parametrize("name", ["bert", "distilbert", "modernbert", "t5", "bart", "llama", "mistral"])
@pytest.mark.parametrize("implementation", ["xsa_eager", "xsa_sdpa", "xsa_flash"])
def test_padding_has_no_influence(name, implementation):
    model = copy.deepcopy(converted(name))
    model.set_attn_implementation(implementation)
    whole = inputs(name, batch=1)
    alone = {k: v[:, :5] if k in ("input_ids", "attention_mask") else v for k, v in whole.items()}
    padded = dict(alone)
    padded["input_ids"] = torch.cat([alone["input_ids"], torch.full((1, 3), 7)], dim=1)
    padded["attention_mask"] = torch.cat(
        [alone["attention_mask"], torch.zeros(1, 3, dtype=torch.long)], dim=1
    )
    with torch.no_grad():
        expected, got = output(model, alone), output(model, padded)
    assert (got[:, : expected.shape[1]] - expected).abs().max() < closeness(expected)
