"""Initial weights follow seed and name alone."""

import math

import pytest
import torch
from torch import nn

from xsa_core import GPT, Encoder, EncoderConfig, GPTConfig, Role, initialize, parameter_roles, weights_sha256
from xsa_core.attention.variants import VARIANTS
from xsa_core.initialization import variant_parameter_names
from xsa_core.roles import canonical_name

SIZES = {"n_layers": 3, "n_heads": 4, "d_model": 64, "max_seq_len": 8}


def gpt(seed=0, dtype=torch.float32, **options):
    model = GPT(GPTConfig(vocab_size=101, **(SIZES | options))).to(dtype)
    initialize(model, seed)
    return model


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_share_every_weight_they_share_by_name(variant):
    plain, other = gpt(variant="sa"), gpt(variant=variant)
    extra = variant_parameter_names(other)
    shared = dict(other.named_parameters())
    assert set(shared) - set(dict(plain.named_parameters())) == extra
    for name, p in plain.named_parameters():
        assert torch.equal(p, shared[name])
    assert weights_sha256(plain) == weights_sha256(other)
    assert (weights_sha256(plain, variant=True) == weights_sha256(other, variant=True)) == (not extra)


def test_global_generator_and_construction_have_no_influence():
    torch.manual_seed(1)
    a = gpt()
    before = torch.get_rng_state()
    initialize(a, 0)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    assert weights_sha256(a) == weights_sha256(gpt())
    assert weights_sha256(a) != weights_sha256(gpt(seed=1))


def test_equal_shapes_under_different_names_differ():
    model = gpt()
    a, b = (model.blocks[i].attention.qkv.weight for i in (0, 1))
    assert abs(torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1]) < 5 / math.sqrt(a.numel())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtype_changes_only_the_rounding(dtype):
    for a, b in zip(gpt().parameters(), gpt(dtype=dtype).parameters(), strict=True):
        assert torch.equal(a.to(dtype), b)


def test_scales_are_those_of_the_rule():
    model = gpt(bias=True, tie_embeddings=False, n_sinks=2, variant="head_norm", qk_norm=True)
    for name, role in parameter_roles(model).items():
        p = model.get_parameter(name)
        if role.role is Role.NORM:
            assert (p == 1).all()
        elif role.role is Role.BIAS:
            assert (p == 0).all()
        else:
            std = 0.02 / (math.sqrt(6) if name.endswith(("out.weight", "down.weight")) else 1)
            spread = 5 / math.sqrt(2 * p.numel())  # five standard errors of an estimated deviation
            assert abs(p.std().item() / std - 1) < spread, name
            assert abs(p.mean().item()) < 5 * std / math.sqrt(p.numel()), name
    learned = gpt(variant="xsa_learned")
    assert all((b.attention.variant.raw_strength == 0).all() for b in learned.blocks)


def test_convolutions_keep_the_variance_of_their_input():
    layer = nn.Conv1d(16, 256, 9)
    initialize(layer, 0)
    x = torch.randn(8, 16, 64, generator=torch.Generator().manual_seed(0))
    assert layer(x).std().item() == pytest.approx(1, abs=0.05)


def test_random_directions_are_unit_vectors_of_seed_and_layer():
    model = gpt(variant="random_direction")
    directions = [b.attention.variant.direction for b in model.blocks]
    for d in directions:
        torch.testing.assert_close(d.norm(dim=-1), torch.ones(4))
    assert not torch.equal(directions[0], directions[1])
    again, other = gpt(variant="random_direction"), gpt(variant="random_direction", seed=1)
    assert torch.equal(again.blocks[0].attention.variant.direction, directions[0])
    assert not torch.equal(other.blocks[0].attention.variant.direction, directions[0])


def test_model_from_the_meta_device_gets_the_same_weights_and_ties():
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=101, variant="random_direction", **SIZES))
    with pytest.raises(ValueError, match="to_empty"):
        initialize(model, 0)
    model.to_empty(device="cpu")
    initialize(model, 0)
    reference = gpt(variant="random_direction")
    assert model.head.weight is model.embedding.weight
    assert all(torch.equal(v, reference.state_dict()[k]) for k, v in model.state_dict().items())


def test_wrappers_change_no_weight():
    compiled = torch.compile(GPT(GPTConfig(vocab_size=101, **SIZES)))
    initialize(compiled, 0)
    assert weights_sha256(compiled) == weights_sha256(gpt())
    assert (
        canonical_name("module._orig_mod.blocks.0._checkpoint_wrapped_module.mlp.up.weight")
        == "blocks.0.mlp.up.weight"
    )


def test_encoder_and_decoder_in_one_model_each_have_their_own_depth():
    both = nn.ModuleDict(
        {
            "text": GPT(GPTConfig(vocab_size=101, **SIZES)),
            "sound": Encoder(EncoderConfig(**(SIZES | {"n_layers": 1}))),
        }
    )
    roles = parameter_roles(both)
    assert roles["text.blocks.0.mlp.down.weight"].residual_branches == 6
    assert roles["sound.blocks.0.mlp.down.weight"].residual_branches == 2


def test_digest_sees_single_bits_and_names():
    model = gpt()
    digest = weights_sha256(model)
    with torch.no_grad():
        model.blocks[1].mlp.up.weight[3, 4] *= 1 + torch.finfo(torch.float32).eps
    assert weights_sha256(model) != digest
