"""Roles of parameters: what each one is, told by the model, so that optimizers need not know models.

Three sources, the outermost first: what a module declares about itself and all below it (`declared_roles`),
    then
the rule of the class that owns the parameter. A parameter that neither knows is an error, never a default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from torch import nn


class Role(StrEnum):
    """What a parameter is to an optimizer."""

    HIDDEN_MATRIX = "hidden matrix"
    EMBEDDING = "embedding"
    HEAD = "head"
    NORM = "norm"
    BIAS = "bias"
    STRENGTH = "strength"
    SINK = "sink"
    PATCH = "patch or convolution kernel"


@dataclass(frozen=True)
class ParameterRole:
    """Role of one parameter.

    Attributes:
        role: the role.
        splits: rows of the separate matrices that a fused weight stacks, e.g. `(H*D, Hkv*D, Hkv*D)`; empty
            when it is one matrix.
        residual_branches: for the last matrix of a residual branch, the number of such branches in its
            stack; 0 for all else. Initialisation scales by it.
    """

    role: Role
    splits: tuple[int, ...] = ()
    residual_branches: int = 0


# Wrappers put their own name in front or in between; a name must not depend on them.
_WRAPPERS = ("_orig_mod.", "module.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")

_NORM = {"weight": Role.NORM, "bias": Role.BIAS}
_CONVOLUTION = {"weight": Role.PATCH, "bias": Role.BIAS}

# Class -> parameter name -> role. Subclasses follow their base.
CLASS_ROLES: dict[type[nn.Module], dict[str, Role]] = {
    nn.Linear: {"weight": Role.HIDDEN_MATRIX, "bias": Role.BIAS},
    nn.Bilinear: {"weight": Role.PATCH, "bias": Role.BIAS},
    nn.Embedding: {"weight": Role.EMBEDDING},
    nn.LayerNorm: _NORM,
    nn.RMSNorm: _NORM,
    nn.GroupNorm: _NORM,
    nn.BatchNorm1d: _NORM,
    nn.BatchNorm2d: _NORM,
    nn.Conv1d: _CONVOLUTION,
    nn.Conv2d: _CONVOLUTION,
    nn.Conv3d: _CONVOLUTION,
    nn.PReLU: {"weight": Role.NORM},
    nn.MultiheadAttention: {
        "q_proj_weight": Role.HIDDEN_MATRIX,
        "k_proj_weight": Role.HIDDEN_MATRIX,
        "v_proj_weight": Role.HIDDEN_MATRIX,
        "in_proj_bias": Role.BIAS,
        "bias_k": Role.SINK,
        "bias_v": Role.SINK,
    },
}


def canonical_name(name: str) -> str:
    """Parameter name without what compile, DDP, checkpoint and FSDP wrappers put into it.

    >>> canonical_name("module._orig_mod.blocks.0.mlp.up.weight")
    'blocks.0.mlp.up.weight'
    """
    for wrapper in _WRAPPERS:
        while name.startswith(wrapper):
            name = name[len(wrapper) :]
        name = name.replace(f".{wrapper}", ".") if wrapper.startswith("_") else name
    return name


def parameter_roles(
    model: nn.Module, declared: Mapping[str, ParameterRole] | None = None
) -> dict[str, ParameterRole]:
    """The role of every parameter of a model.

    Args:
        model: any module. A module anywhere in it may have a method `declared_roles() -> {relative name:
            role}`; where two speak of one parameter, the outer one is right.
        declared: roles by full name for parameters of foreign modules; they win over everything.

    Returns:
        Name (as in `model.named_parameters()`, a tied parameter once, under its first name) -> role.

    Raises:
        ValueError: a parameter whose role nobody tells, or a declaration for a parameter that is not there.
    """
    told: dict[str, ParameterRole] = {}
    every_name = {canonical_name(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    modules = dict(model.named_modules(remove_duplicate=False))
    for prefix, module in modules.items():  # outer modules come first
        # Looked up on the class: wrappers forward attributes of what they wrap.
        tell = getattr(type(module), "declared_roles", None)
        for name, role in tell(module).items() if tell else ():
            full = canonical_name(f"{prefix}.{name}" if prefix else name)
            if full not in every_name:
                raise ValueError(
                    f"{type(module).__name__} ({prefix or 'root'}) declares a role for {name}, which it lacks"
                )
            told.setdefault(full, role)
    for name, role in (declared or {}).items():
        name = canonical_name(name)
        if name not in every_name:
            raise ValueError(
                f"a role is declared for {name}, which is no parameter of {type(model).__name__}"
            )
        told[name] = role
    roles: dict[str, ParameterRole] = {}
    unknown: list[str] = []
    for name, parameter in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        role = told.get(canonical_name(name)) or _class_role(modules[owner], leaf, parameter)
        if role is None:
            unknown.append(f"{name} {tuple(parameter.shape)} of {type(modules[owner]).__name__}")
        else:
            roles[name] = role
    if unknown:
        raise ValueError(
            f"no role is known for {'; '.join(unknown)}: add it to declared_roles() or pass declared="
        )
    return roles


def _class_role(module: nn.Module, leaf: str, parameter: nn.Parameter) -> ParameterRole | None:
    """What the owner's class says of its parameter."""
    if isinstance(module, nn.MultiheadAttention) and leaf == "in_proj_weight":
        return ParameterRole(Role.HIDDEN_MATRIX, splits=(parameter.shape[0] // 3,) * 3)
    for kind in type(module).__mro__:
        role = CLASS_ROLES.get(kind, {}).get(leaf)
        if role is not None:
            return ParameterRole(role)
    return None
