"""Initial weights that depend on a seed and the parameter's name, and on nothing else.

Each parameter has its own random generator. So two models that differ in a variant's extra parameters, in
the order of construction or in the device still start from the same weights wherever they share a name,
which is what a paired comparison needs.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from xsa_core.attention.variants import Variant
from xsa_core.roles import ParameterRole, Role, canonical_name, parameter_roles

STD = 0.02  # GPT-2's, for every matrix


def initialize(model: nn.Module, seed: int, declared: Mapping[str, ParameterRole] | None = None) -> None:
    """Set all parameters and seeded buffers in place, by nanoGPT's rule.

    Matrices, embeddings and sinks N(0, 0.02); the last matrix of a residual branch N(0, 0.02 /
    sqrt(branches)); kernels of convolutions N(0, 1 / fan-in); biases 0, norms 1, strengths 0. Random
    numbers are drawn in float32 on the CPU whatever the model's dtype and device, so these do not change
    the start either. Sharded parameters (DTensor) get their shard of the same values.

    Args:
        model: any module whose parameters have roles; not on the meta device.
        seed: of the run.
        declared: see `parameter_roles`.

    Raises:
        ValueError: a parameter without a role, or on the meta device.
    """
    for module in model.modules():
        if hasattr(type(module), "tie_weights") and hasattr(type(module), "declared_roles"):
            module.tie_weights()
    roles = parameter_roles(model, declared)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.is_meta:
                raise ValueError(
                    f"{name} is on the meta device: move the model with to_empty(device=...) first"
                )
            _fill(parameter, _initial_value(parameter.shape, roles[name], _generator(seed, name)))
    seed_buffers(model, seed)


def seed_buffers(model: nn.Module, seed: int) -> None:
    """Draw the seeded buffers of a model, e.g. fixed random directions, each from its name and the seed."""
    with torch.no_grad():
        for prefix, module in model.named_modules():
            for name, draw in getattr(type(module), "seeded_buffers", _no_buffers)(module).items():
                full = f"{prefix}.{name}" if prefix else name
                module.get_buffer(name).copy_(draw(_generator(seed, full)))


def variant_parameter_names(model: nn.Module) -> frozenset[str]:
    """Names of the parameters that only the attention variant brought: what a paired model need not share."""
    return frozenset(
        f"{prefix}.{name}"
        for prefix, module in model.named_modules()
        if isinstance(module, Variant)
        for name, _ in module.named_parameters()
    )


def weights_sha256(model: nn.Module, *, variant: bool = False) -> str:
    """Digest of the parameters that variants share or, with `variant=True`, of those they do not.

    Covers names (without wrappers), shapes, dtypes and bits, in order of names. Empty sets have a digest too.
    """
    extra = variant_parameter_names(model)
    digest = hashlib.sha256()
    chosen = ((canonical_name(n), p) for n, p in model.named_parameters() if (n in extra) == variant)
    for name, parameter in sorted(chosen, key=lambda pair: pair[0]):
        whole = _whole(parameter.detach()).cpu().contiguous()
        digest.update(f"{name} {tuple(whole.shape)} {whole.dtype}\n".encode())
        digest.update(whole.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _generator(seed: int, name: str) -> torch.Generator:
    """A generator of its own for a name."""
    digest = hashlib.sha256(f"{seed}:{canonical_name(name)}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _initial_value(shape: torch.Size, role: ParameterRole, generator: torch.Generator) -> Tensor:
    """Float32 values of one whole parameter, on the CPU."""
    if role.role is Role.NORM:
        return torch.ones(shape)
    if role.role in (Role.BIAS, Role.STRENGTH):
        return torch.zeros(shape)
    std = STD
    if role.role is Role.PATCH:
        std = 1 / math.sqrt(max(1, math.prod(shape[1:])))
    if role.residual_branches:
        std /= math.sqrt(role.residual_branches)
    return torch.randn(shape, generator=generator) * std


def _no_buffers(module: nn.Module) -> dict[str, Callable[[torch.Generator], Tensor]]:
    return {}


def _fill(parameter: Tensor, value: Tensor) -> None:
    """Copy a whole value into a parameter, or its shard into a sharded one."""
    if type(parameter.data).__name__ == "DTensor":
        from torch.distributed.tensor import distribute_tensor

        value = value.to(parameter.device, parameter.dtype)
        # Every rank drew the same values: nothing needs to be sent.
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(value)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
