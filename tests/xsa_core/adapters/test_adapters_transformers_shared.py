"""Models that share a config, a plain attention function set by hand, layers of other libraries."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

import xsa_core.adapters.transformers  # noqa: E402, F401
from xsa_core.adapters import convert, converted_layers, revert  # noqa: E402

IDS = torch.arange(3, 9)[None]


def config():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.LlamaConfig(vocab_size=16, **sizes)


def pair():
    """Two models of one config object."""
    shared = config()
    torch.manual_seed(0)
    return tuple(transformers.LlamaForCausalLM(shared).eval() for _ in range(2))


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def test_reverting_one_of_two_models_of_a_config_leaves_the_other_exclusive():
    a, b = pair()
    plain_a, plain_b = logits(a), logits(b)
    convert(a)
    assert torch.equal(logits(b), plain_b)
    convert(b)
    exclusive_b = logits(b)
    assert not torch.equal(exclusive_b, plain_b)
    revert(a)
    assert torch.equal(logits(a), plain_a)
    assert torch.equal(logits(b), exclusive_b)
    revert(b)
    assert torch.equal(logits(b), plain_b)
    assert b.config._attn_implementation == "sdpa"


def test_another_attention_function_for_one_of_two_models_leaves_the_other_exclusive():
    a, b = pair()
    plain_b = logits(b)
    exclusive_a = logits(convert(a))
    b.set_attn_implementation("eager")
    assert torch.equal(logits(a), exclusive_a)
    torch.testing.assert_close(logits(b), plain_b)
    b.set_attn_implementation("xsa_sdpa")
    assert len(converted_layers(b)) == 2
    assert not torch.allclose(logits(b), plain_b)


def test_saving_the_plain_one_of_two_models_changes_neither(tmp_path: Path):
    a, b = pair()
    plain_b = logits(b)
    exclusive_a = logits(convert(a, layers="first:1"))
    b.save_pretrained(tmp_path)
    assert torch.equal(logits(a), exclusive_a)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    assert not converted_layers(loaded)
    assert torch.equal(logits(loaded), plain_b)


def test_a_plain_attention_function_by_hand_does_not_turn_an_exclusive_model_plain():
    model = convert(transformers.LlamaForCausalLM(config()).eval())
    exclusive = logits(model)
    model.config._attn_implementation = "sdpa"
    with pytest.raises(ValueError, match="which is plain"):
        logits(model)
    model.config._attn_implementation = "xsa_sdpa"
    assert torch.equal(logits(model), exclusive)


class Extended(transformers.BertModel):
    """A model of transformers with a layer of torch."""

    def __init__(self, config):
        super().__init__(config)
        self.extra = torch.nn.TransformerEncoderLayer(16, 2, 16, batch_first=True)
        self.post_init()


def test_a_model_with_exclusive_layers_of_other_libraries_is_not_saved_by_half(tmp_path: Path):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = convert(Extended(transformers.BertConfig(vocab_size=16, **sizes)))
    assert "extra.self_attn" in converted_layers(model)
    with pytest.raises(ValueError, match=r"extra\.self_attn"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    revert(model, layers=lambda path: path.startswith("extra"))
    model.save_pretrained(tmp_path)
    assert len(converted_layers(Extended.from_pretrained(tmp_path))) == 1


def test_a_part_of_a_model_is_refused_with_what_to_do_instead():
    model = transformers.LlamaForCausalLM(config())
    for part in (model.model.layers, model.model.layers[0].self_attn):
        with pytest.raises(ValueError, match="convert the whole model"):
            convert(part)


def test_softmax_attention_beside_linear_attention_is_self_attention():
    from xsa_core.adapters.hf.classes import role

    file = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    assert role("layers.4.self_attn", file.KimiLinearAttention) == "self"
    assert role("layers.0.self_attn", file.KimiLinearDeltaAttention) == "linear"


def test_latents_of_a_perceiver_that_attend_to_each_other_are_no_pooling():
    from transformers.models.perceiver.modeling_perceiver import PerceiverSelfAttention

    from xsa_core.adapters.hf.classes import role

    assert role("encoder.self_attends.0.attention.self", PerceiverSelfAttention) == "self"
    assert role("encoder.cross_attention.attention.self", PerceiverSelfAttention) != "self"
