"""Figure 1 of transformers models whose attention the fused operator does not know: soft caps and sinks."""

import pytest
import torch
from torch.nn.functional import cosine_similarity, normalize

pytest.importorskip("transformers")
from transformers_zoo import FAMILIES, build, inputs

from xsa_core.adapters import convert, converted_layers
from xsa_core.adapters.probing import probe_as_it_stands, probe_converted

HEAD = 8


def from_returned_weights(name: str) -> list[list[float]]:
    """cos(y, v), a_ii and cos(v_i, v_j) of every layer from the weights that the plain model returns."""
    model, values = build(name), []
    model.set_attn_implementation("eager")
    for layer in model.model.layers:
        layer.self_attn.v_proj.register_forward_hook(lambda m, args, out: values.append(out))
    with torch.no_grad():
        weights = model(**inputs(name), use_cache=False, output_attentions=True).attentions
    rows = []
    for a, v in zip(weights, values, strict=True):
        v = v.unflatten(-1, (-1, HEAD)).transpose(1, 2)  # B Hkv T D
        T = v.shape[2]
        pairs = normalize(v, dim=-1) @ normalize(v, dim=-1).transpose(-1, -2)
        own = v.repeat_interleave(a.shape[1] // v.shape[1], dim=1)
        a = a[..., :T]
        cosine = cosine_similarity(a @ own, own, dim=-1).mean()
        off = ((pairs.sum((-1, -2)) - T) / (T * (T - 1))).mean()
        rows.append([cosine.item(), a.diagonal(dim1=-2, dim2=-1).mean().item(), off.item()])
    return rows


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "llama"])
def test_statistics_are_those_of_the_weights_the_model_returns(name):
    batch = {**inputs(name), "use_cache": False}
    model = build(name)
    layers = probe_as_it_stands(model, [batch])
    got = [[*layer.means().values()][:3] for layer in layers]
    assert not converted_layers(model)
    torch.testing.assert_close(
        torch.tensor(got), torch.tensor(from_returned_weights(name)), atol=2e-5, rtol=1e-4
    )
    converted = probe_converted(convert(model), [batch])
    assert converted[0].means()["cosine_output_value"] == pytest.approx(got[0][0], abs=2e-5)
    assert len(converted) == FAMILIES[name].layers


def test_a_cache_is_refused():
    model = convert(build("llama"))
    with torch.no_grad():
        cache = model(**inputs("llama")).past_key_values
    one = {"input_ids": inputs("llama")["input_ids"][:, :1], "cache": cache}
    with pytest.raises(ValueError, match="without a cache"):
        probe_converted(model, [one])
