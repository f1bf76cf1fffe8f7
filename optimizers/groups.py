"""Which parameter is updated how: decided by its role, once, for every optimizer.

Rules: matrices of hidden layers take Muon where it is on; embeddings, heads and patch kernels take
Adam; all four take weight decay. Norms, biases, XSA strengths and sinks take Adam without decay.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from optimizers.config import OptimizerConfig
from xsa_core.roles import ParameterRole, Role, parameter_roles

DECAYED = {Role.HIDDEN_MATRIX, Role.EMBEDDING, Role.HEAD, Role.PATCH}
WITH_MUON = {"muon", "muon_torch"}


@dataclass(frozen=True)
class Assignment:
    """How one parameter is updated. `splits`: row blocks that are orthogonalised separately."""

    name: str
    parameter: nn.Parameter
    role: ParameterRole
    algorithm: str  # "adamw" or "muon"
    lr: float
    weight_decay: float


def assign(model: nn.Module, config: OptimizerConfig) -> list[Assignment]:
    """Return one assignment for every trainable parameter, in the model's order.

    Raises:
        ValueError: a parameter without a role, or a role without a parameter.
    """
    roles = parameter_roles(model)
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    check_covered(named, roles)
    return [assign_one(name, parameter, roles[name], config) for name, parameter in named.items()]


def check_covered(named: Iterable[str], roles: Iterable[str]) -> None:
    """Refuse a model whose roles and parameters are not the same set."""
    missing = sorted(set(named) - set(roles))
    if missing:
        raise ValueError(
            f"no role for parameter {missing[0]}; every parameter needs exactly one (xsa_core.roles)"
        )


def assign_one(
    name: str, parameter: nn.Parameter, role: ParameterRole, config: OptimizerConfig
) -> Assignment:
    """Apply the rules to one parameter."""
    has_muon = config.name in WITH_MUON
    muon = has_muon and role.role is Role.HIDDEN_MATRIX
    adam_lr = config.adam_lr if has_muon and config.adam_lr else config.lr
    return Assignment(
        name=name,
        parameter=parameter,
        role=role,
        algorithm="muon" if muon else "adamw",
        lr=config.lr if muon else adam_lr,
        weight_decay=config.weight_decay if role.role in DECAYED else 0.0,
    )
