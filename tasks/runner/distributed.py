"""The processes of one run. Under torchrun the environment tells rank and world size; alone it is one.

Only the reductions the loop needs stand here; data parallelism itself is torch's.
"""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn


@dataclass(frozen=True)
class Ranks:
    """This process among those of the run."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self.rank == 0


def join() -> Ranks:
    """Join the run's process group where torchrun started several processes."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return Ranks()
    local = int(os.environ["LOCAL_RANK"])
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend)
    return Ranks(dist.get_rank(), size, local, int(os.environ.get("LOCAL_WORLD_SIZE", size)))


def leave() -> None:
    """Leave the process group, if one was joined."""
    if dist.is_initialized():
        dist.destroy_process_group()


def parallel(model: nn.Module, ranks: Ranks, device: torch.device) -> nn.Module:
    """Wrap the model for data parallelism where there is more than one process."""
    if ranks.world_size == 1:
        return model
    ids = [device.index] if device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(model, device_ids=ids)


def total(value: float, ranks: Ranks, device: torch.device) -> float:
    """Return the sum of a number over all ranks."""
    if ranks.world_size == 1:
        return value
    tensor = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(tensor)
    return tensor.item()
