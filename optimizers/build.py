"""Optimizers by name. A builder takes assignments and the config, and returns a torch Optimizer.

Every group carries `peak_lr`; the schedule sets `lr` from it before each step.
"""

from collections.abc import Callable

import torch
from torch import nn

from optimizers.config import OptimizerConfig
from optimizers.groups import Assignment, assign
from optimizers.muon import MuonWithAuxAdam, TorchMuonWithAdamW


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Return the configured optimizer over every trainable parameter of `model`.

    Raises:
        ValueError: a parameter without a role.
    """
    optimizer = BUILDERS[config.name](assign(model, config), config)
    for group in optimizer.param_groups:
        group["peak_lr"] = group["lr"]
    return optimizer


def build_adamw(assignments: list[Assignment], config: OptimizerConfig) -> torch.optim.AdamW:
    """Return AdamW (Loshchilov & Hutter 2019), fused: one pass over the parameters of a group."""
    return torch.optim.AdamW(adam_groups(assignments, config), fused=True)


def build_muon(assignments: list[Assignment], config: OptimizerConfig) -> MuonWithAuxAdam:
    """Return Muon for hidden matrices and Adam for the rest, over the package muon-optimizer."""
    return MuonWithAuxAdam(*muon_groups(assignments, config), config.lr_scale)


def build_muon_torch(assignments: list[Assignment], config: OptimizerConfig) -> TorchMuonWithAdamW:
    """Return Muon for hidden matrices and AdamW for the rest, over torch's own classes."""
    return TorchMuonWithAdamW(*muon_groups(assignments, config), config.lr_scale)


def muon_groups(
    assignments: list[Assignment], config: OptimizerConfig
) -> tuple[list[dict], list[tuple[int, ...]]]:
    """Return parameter groups, Adam's first, and for each the row blocks of its matrices."""
    groups = [{**group, "use_muon": False} for group in adam_groups(assignments, config)]
    matrices: dict[tuple[int, ...], list[Assignment]] = {}
    for assignment in assignments:
        if assignment.algorithm == "muon":
            matrices.setdefault(assignment.role.splits, []).append(assignment)
    splits: list[tuple[int, ...]] = [()] * len(groups)
    for split, members in matrices.items():
        groups.append(
            {
                "params": [member.parameter for member in members],
                "lr": config.lr,
                "momentum": config.momentum,
                "weight_decay": config.weight_decay,
                "use_muon": True,
            }
        )
        splits.append(split)
    return groups, splits


def adam_groups(assignments: list[Assignment], config: OptimizerConfig) -> list[dict]:
    """Return Adam's parameter groups: one for every weight decay that occurs."""
    groups: dict[float, dict] = {}
    for assignment in assignments:
        if assignment.algorithm != "adamw":
            continue
        group = groups.setdefault(
            assignment.weight_decay,
            {
                "params": [],
                "lr": assignment.lr,
                "betas": (config.beta1, config.beta2),
                "eps": config.eps,
                "weight_decay": assignment.weight_decay,
            },
        )
        group["params"].append(assignment.parameter)
    return list(groups.values())


BUILDERS: dict[str, Callable[[list[Assignment], OptimizerConfig], torch.optim.Optimizer]] = {
    "adamw": build_adamw,
    "muon": build_muon,
    "muon_torch": build_muon_torch,
}
