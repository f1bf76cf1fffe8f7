"""A model in shards over the ranks (FSDP2, torch's fully_shard), computing what the whole model computes.

Weights, gradients and optimizer state are cut by rows, `Shard(0)`. Weights are gathered block by block for a
forward or backward pass and dropped again.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from xsa_core.layers import Block


def shard(model: nn.Module, device: torch.device, precision: str) -> nn.Module:
    """Shard a model in place over all ranks and return it.

    With precision bfloat16 the matrices of our own blocks are gathered in bfloat16: half the traffic, and the
    bits that autocast would make of the whole weight. All else (norms, strengths, sinks, embeddings, blocks
    of other libraries) is gathered as it is and left to autocast, so the numerics are those of one process.
    Gradients are averaged in the type of the weights.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    plain = MixedPrecisionPolicy(cast_forward_inputs=False)
    half = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for block in blocks(model):
        linear = [module for module in block.modules() if type(module) is nn.Linear]
        if precision == "bfloat16" and isinstance(block, Block):
            fully_shard(linear, mesh=mesh, mp_policy=half)
        else:
            fully_shard(block, mesh=mesh, mp_policy=plain)
    return fully_shard(model, mesh=mesh, mp_policy=plain)


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost members of the model's lists of modules: its layers."""
    for child in model.children():
        if isinstance(child, nn.ModuleList | nn.Sequential):
            yield from (member for member in child if next(member.parameters(), None) is not None)
        else:
            yield from blocks(child)


def is_sharded(model: nn.Module) -> bool:
    """Tell whether a model's parameters are in shards."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def clip_gradients(parameters: list[nn.Parameter], limit: float) -> float:
    """Scale gradients to a norm of at most `limit`; return the norm before, over all shards."""
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return norm.item()


def placed_like(value: Any, template: Tensor) -> Any:
    """Return a whole tensor as the shard that `template` is; whatever has another shape stays as it is."""
    fits = isinstance(template, DTensor) and isinstance(value, Tensor) and value.shape == template.shape
    if not fits or isinstance(value, DTensor):
        return value
    # Every rank has the whole: nothing is sent.
    device = template.device_mesh.device_type
    return distribute_tensor(value.to(device), template.device_mesh, template.placements, src_data_rank=None)


def optimizer_state_placed(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's state dict with tensors sharded as the parameters they belong to."""
    return {
        **state,
        "state": {
            index: {name: placed_like(value, parameter_at(optimizer, index)) for name, value in entry.items()}
            for index, entry in state["state"].items()
        },
    }


def parameter_at(optimizer: torch.optim.Optimizer, index: int) -> nn.Parameter:
    """Return the parameter that a state dict names by its place in all groups."""
    for group in optimizer.param_groups:
        if index < len(group["params"]):
            return group["params"][index]
        index -= len(group["params"])
    raise ValueError("the checkpoint holds the state of more parameters than the model has")


def places(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Return where the tensors of a sharded checkpoint belong on this rank, as `shards.read` asks for it.

    None for a model that is not sharded: it takes whole tensors.
    """
    shapes = model.state_dict()
    if not any(isinstance(tensor, DTensor) for tensor in shapes.values()):
        return None

    def place(name: str, size: torch.Size, dtype: torch.dtype) -> Tensor:
        section, *path = name.split("/")
        template = None
        if section == "model":
            template = shapes.get("/".join(path))
        elif section == "optimizer" and path[0] == "state":
            template = parameter_at(optimizer, int(path[1])).detach()
        if isinstance(template, DTensor) and template.shape == size:
            return torch.empty_like(template, dtype=dtype)
        return torch.empty(size, dtype=dtype)

    return place
