"""Every parameter is updated exactly once, by the rule of its role."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from optimizers.build import BUILDERS, build_optimizer
from optimizers.groups import DECAYED, assign
from xsa_core import Encoder, EncoderConfig
from xsa_core.roles import ParameterRole, Role

UNDECAYED = {Role.NORM, Role.BIAS, Role.STRENGTH, Role.SINK}


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_is_in_exactly_one_group(
    decoder: Callable, settings: Callable, name: str, tied: bool
) -> None:
    model = decoder(tie_embeddings=tied)
    optimizer = build_optimizer(model, settings(name))
    grouped = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) == {id(parameter) for parameter in model.parameters()}


def test_a_frozen_parameter_is_in_no_group(decoder: Callable, settings: Callable) -> None:
    model = decoder()
    model.embedding.weight.requires_grad_(False)
    optimizer = build_optimizer(model, settings())
    grouped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert id(model.embedding.weight) not in grouped
    assert len(grouped) == len(list(model.parameters())) - 1


def test_every_role_is_either_decayed_or_not() -> None:
    assert set(Role) == DECAYED | UNDECAYED
    assert not DECAYED & UNDECAYED


@pytest.mark.parametrize("name", BUILDERS)
def test_only_matrices_and_embeddings_decay(decoder: Callable, settings: Callable, name: str) -> None:
    model = decoder()
    assignments = assign(model, settings(name))
    assert {a.role.role for a in assignments} >= {*UNDECAYED, Role.HIDDEN_MATRIX, Role.EMBEDDING}
    for a in assignments:
        matrix = a.parameter.ndim >= 2 and a.role.role not in UNDECAYED
        assert a.weight_decay == (0.1 if matrix else 0.0), a.name
    optimizer = build_optimizer(model, settings(name))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decay == {id(a.parameter): a.weight_decay for a in assignments}


@pytest.mark.parametrize("kind", ["muon", "muon_torch"])
def test_muon_takes_hidden_matrices_alone(decoder: Callable, settings: Callable, kind: str) -> None:
    model = decoder(tie_embeddings=False)
    by_algorithm: dict[str, set[Role]] = {}
    for a in assign(model, settings(kind)):
        by_algorithm.setdefault(a.algorithm, set()).add(a.role.role)
    assert by_algorithm["muon"] == {Role.HIDDEN_MATRIX}
    assert by_algorithm["adamw"] >= {*UNDECAYED, Role.EMBEDDING, Role.HEAD}
    optimizer = build_optimizer(model, settings(kind))
    muon = {id(p) for group in optimizer.param_groups if group["use_muon"] for p in group["params"]}
    names = {name for name, p in model.named_parameters() if id(p) in muon}
    assert names
    assert not [
        name for name in names if "embed" in name or "head.weight" in name or "norm" in name or "bias" in name
    ]


VARIANTS = ("sa", "xsa", "xsa_learned", "random_direction", "mean_direction", "head_norm", "diag_masked")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_each_parameter_of_each_model_follows_its_kind(
    decoder: Callable, settings: Callable, kind: str, name: str, variant: str
) -> None:
    """By name, without looking at roles: matrices and embeddings decay, hidden matrices take Muon."""
    if kind == "decoder":
        model = decoder(variant=variant, tie_embeddings=False, qk_norm=True)
    else:
        sizes = {"n_layers": 2, "d_model": 16, "n_heads": 4, "max_seq_len": 8}
        model = Encoder(EncoderConfig(**sizes, variant=variant, bias=True, n_sinks=2, qk_norm=True))
    hidden = ("qkv.weight", "out.weight", "up.weight", "down.weight")
    assignments = assign(model, settings(name))
    assert len(assignments) == len(list(model.parameters()))
    for a in assignments:
        is_hidden = a.name.endswith(hidden)
        is_embedding = a.name in {"embedding.weight", "head.weight"}
        assert a.algorithm == ("muon" if is_hidden and name != "adamw" else "adamw"), a.name
        assert a.weight_decay == (0.1 if is_hidden or is_embedding else 0.0), a.name
    assert sum(a.name.endswith(hidden) for a in assignments) == 8


def test_muons_adam_may_have_a_rate_of_its_own(decoder: Callable, settings: Callable) -> None:
    optimizer = build_optimizer(decoder(), settings("muon", adam_lr=0.003))
    assert {group["peak_lr"] for group in optimizer.param_groups if group["use_muon"]} == {0.01}
    assert {group["peak_lr"] for group in optimizer.param_groups if not group["use_muon"]} == {0.003}
    same = build_optimizer(decoder(), settings("muon"))
    assert {group["peak_lr"] for group in same.param_groups} == {0.01}


class Unknown(nn.Module):
    """A module whose parameter nobody gives a role."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.mystery = nn.Parameter(torch.ones(3))


@pytest.mark.parametrize("name", BUILDERS)
def test_a_parameter_without_a_role_is_refused_by_name(settings: Callable, name: str) -> None:
    with pytest.raises(ValueError, match="mystery") as raised:
        build_optimizer(Unknown(), settings(name))
    assert "\n" not in str(raised.value)


def test_a_declared_role_settles_it(settings: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    def declared(module: Any) -> dict[str, ParameterRole]:
        return {"mystery": ParameterRole(Role.SINK)}

    monkeypatch.setattr(Unknown, "declared_roles", declared, raising=False)
    found = {a.name: (a.role.role, a.weight_decay) for a in assign(Unknown(), settings())}
    assert found["mystery"] == (Role.SINK, 0.0)
