"""Every parameter has exactly one role, told by the model."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

from xsa_core import GPT, Encoder, EncoderConfig, GPTConfig, ParameterRole, Role, parameter_roles
from xsa_core.attention.variants import VARIANTS
from xsa_core.layers import Block

SIZES = {"n_layers": 2, "n_heads": 4, "d_model": 16, "max_seq_len": 8}


def gpt(**options):
    return GPT(GPTConfig(vocab_size=11, **(SIZES | options)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_of_our_models_has_one_role(variant):
    for model in (
        gpt(variant=variant, bias=True, qk_norm=True, n_sinks=1),
        gpt(variant=variant, tie_embeddings=False),
        Encoder(EncoderConfig(variant=variant, bias=True, **SIZES)),
    ):
        assert parameter_roles(model).keys() == dict(model.named_parameters()).keys()


def test_roles_of_the_decoder():
    roles = parameter_roles(
        gpt(
            variant="xsa_learned",
            n_kv_heads=2,
            head_dim=6,
            n_sinks=1,
            bias=True,
            qk_norm=True,
            tie_embeddings=False,
        )
    )
    expected = {
        "embedding.weight": ParameterRole(Role.EMBEDDING),
        "embedding_norm.weight": ParameterRole(Role.NORM),
        "embedding_norm.bias": ParameterRole(Role.BIAS),
        "final_norm.weight": ParameterRole(Role.NORM),
        "final_norm.bias": ParameterRole(Role.BIAS),
        "head.weight": ParameterRole(Role.HEAD),
    }
    for i in range(2):
        expected |= {
            f"blocks.{i}.attention_norm.weight": ParameterRole(Role.NORM),
            f"blocks.{i}.attention_norm.bias": ParameterRole(Role.BIAS),
            f"blocks.{i}.attention.qkv.weight": ParameterRole(Role.HIDDEN_MATRIX, splits=(24, 12, 12)),
            f"blocks.{i}.attention.qkv.bias": ParameterRole(Role.BIAS),
            f"blocks.{i}.attention.out.weight": ParameterRole(Role.HIDDEN_MATRIX, residual_branches=4),
            f"blocks.{i}.attention.out.bias": ParameterRole(Role.BIAS),
            f"blocks.{i}.attention.q_norm.weight": ParameterRole(Role.NORM),
            f"blocks.{i}.attention.k_norm.weight": ParameterRole(Role.NORM),
            f"blocks.{i}.attention.sink_k": ParameterRole(Role.SINK),
            f"blocks.{i}.attention.sink_v": ParameterRole(Role.SINK),
            f"blocks.{i}.attention.variant.raw_strength": ParameterRole(Role.STRENGTH),
            f"blocks.{i}.mlp_norm.weight": ParameterRole(Role.NORM),
            f"blocks.{i}.mlp_norm.bias": ParameterRole(Role.BIAS),
            f"blocks.{i}.mlp.up.weight": ParameterRole(Role.HIDDEN_MATRIX),
            f"blocks.{i}.mlp.up.bias": ParameterRole(Role.BIAS),
            f"blocks.{i}.mlp.down.weight": ParameterRole(Role.HIDDEN_MATRIX, residual_branches=4),
            f"blocks.{i}.mlp.down.bias": ParameterRole(Role.BIAS),
        }
    assert roles == expected


def test_tied_matrix_appears_once_as_embedding():
    roles = parameter_roles(gpt())
    assert roles["embedding.weight"].role is Role.EMBEDDING
    assert "head.weight" not in roles


def test_splits_cover_the_rows():
    model = gpt(n_kv_heads=2)
    for name, role in parameter_roles(model).items():
        if role.splits:
            assert sum(role.splits) == model.get_parameter(name).shape[0]


def test_roles_of_torch_modules():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 2),
        nn.BatchNorm2d(4),
        nn.TransformerEncoderLayer(8, 2, 16),
        nn.MultiheadAttention(8, 2, kdim=4),
    )
    roles = parameter_roles(model)
    assert roles["0.weight"].role is Role.PATCH
    assert roles["1.bias"].role is Role.BIAS
    assert roles["2.self_attn.in_proj_weight"] == ParameterRole(Role.HIDDEN_MATRIX, splits=(8, 8, 8))
    assert roles["2.self_attn.out_proj.weight"].role is Role.HIDDEN_MATRIX
    assert roles["3.k_proj_weight"].role is Role.HIDDEN_MATRIX


class Foreign(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.zeros(3))
        self.body = nn.Linear(3, 3)


def test_unknown_parameter_is_an_error_that_names_it():
    with pytest.raises(ValueError, match=r"token \(3,\) of Foreign") as caught:
        parameter_roles(Foreign())
    assert "\n" not in str(caught.value)


def test_outer_declaration_is_right_and_the_argument_wins():
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Foreign()

        def declared_roles(self):
            return {
                "inner.token": ParameterRole(Role.EMBEDDING),
                "inner.body.weight": ParameterRole(Role.HEAD),
            }

    roles = parameter_roles(Wrapper())
    assert roles["inner.token"].role is Role.EMBEDDING
    assert roles["inner.body.weight"].role is Role.HEAD
    told = parameter_roles(Wrapper(), {"inner.token": ParameterRole(Role.SINK)})
    assert told["inner.token"].role is Role.SINK
    with pytest.raises(ValueError, match="no parameter of Wrapper"):
        parameter_roles(Wrapper(), {"inner.tokens": ParameterRole(Role.SINK)})


def test_declaration_for_a_missing_parameter_is_an_error():
    class Wrong(nn.Linear):
        def declared_roles(self):
            return {"wieght": ParameterRole(Role.HEAD)}

    with pytest.raises(ValueError, match="wieght"):
        parameter_roles(nn.Sequential(Wrong(2, 2)))


def test_wrapped_and_compiled_models_have_the_same_roles():
    plain = parameter_roles(gpt())
    model = gpt()
    apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, Block))
    wrapped = parameter_roles(torch.compile(nn.Sequential(model)))
    assert "_orig_mod.0.blocks.1._checkpoint_wrapped_module.mlp.down.weight" in wrapped
    assert list(wrapped.values()) == list(plain.values())
