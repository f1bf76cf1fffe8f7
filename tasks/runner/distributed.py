"""The processes of one run. Under torchrun the environment tells rank and world size; alone it is one.

Only joining and the small exchanges the loop needs stand here; data parallelism itself is torch's.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from tasks.errors import UserError
from tasks.runner.sharding import shard

Result = TypeVar("Result")
NEEDED = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# What torch and its libraries say when a peer is gone; some of them raise a bare RuntimeError.
LOST_WORDS = ("gloo", "NCCL", "Connection closed", "Connection reset", "Broken pipe", "Socket")


LOST = 3  # exit status of a process that ends because another has
LAUNCHED = "XSA_PROCESSES"  # set where `./xsa run --nproc` looks after the processes


class LostContact(RuntimeError):  # noqa: N818  (the error is elsewhere)
    """Another process of the run has ended, so this one cannot go on."""

    def __init__(self) -> None:
        super().__init__(
            "lost contact with another process of this run, whose own message tells why; the same command "
            "goes on from the last checkpoint"
        )


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
    """Join the run's process group where a launcher started several processes.

    Raises:
        UserError: the environment is not that of a launcher, or the processes cannot meet.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return Ranks()
    missing = [
        name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ
    ]
    if missing:
        raise UserError(
            f"WORLD_SIZE is {size}, but {missing[0]} is not set; start with ./xsa run ... --nproc {size} "
            "or with torchrun"
        )
    local = int(os.environ["LOCAL_RANK"])
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        if torch.cuda.is_available() and local < torch.cuda.device_count():
            torch.cuda.set_device(local)
        try:
            with quiet():
                dist.init_process_group(backend)
        except (dist.DistError, RuntimeError) as error:
            raise UserError(no_meeting(str(error))) from error
    return Ranks(dist.get_rank(), size, local, int(os.environ.get("LOCAL_WORLD_SIZE", size)))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what libraries write on standard output (gloo: that it has connected) out of ours."""
    sys.stdout.flush()
    kept = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def no_meeting(reason: str) -> str:
    """Return the line for processes that could not meet."""
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    if "EADDRINUSE" in reason or "address already in use" in reason.lower():
        return f"{place}: the port is in use; give another (torchrun --master-port, or MASTER_PORT)"
    return (
        f"the processes could not meet at {place} ({reason.splitlines()[0][:120]}); "
        "check that all were started and reach that address"
    )


def leave() -> None:
    """Leave the process group, if one was joined, when all have done their work."""
    if not dist.is_initialized():
        return
    wait_for_all(Ranks(dist.get_rank(), dist.get_world_size()))
    if threading.current_thread() is threading.main_thread():
        # A launcher that sees one process end with a status stops the others, which have only to say goodbye.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.destroy_process_group()


def environment_rank() -> int:
    """Return this process's rank as the launcher has told it, before the processes have met."""
    return int(os.environ.get("RANK", "0")) if int(os.environ.get("WORLD_SIZE", "1")) > 1 else 0


def is_lost_contact(error: BaseException) -> bool:
    """Tell whether an error means that another process of the run is gone."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in LOST_WORDS)


def parallel(
    model: nn.Module,
    ranks: Ranks,
    device: torch.device,
    strategy: str = "auto",
    precision: str = "float32",
) -> nn.Module:
    """Wrap the model for several processes: `ddp` (also `auto`) or, in place, `fsdp`.

    Raises:
        ValueError: a model that cannot be sharded.
    """
    if ranks.world_size == 1:
        return model
    if strategy == "fsdp":
        return shard(model, device, precision)
    ids = [device.index] if device.type == "cuda" else None
    # A parameter that a batch does not use, on any rank or on some, must not stop the others.
    return nn.parallel.DistributedDataParallel(model, device_ids=ids, find_unused_parameters=True)


def total(value: float, ranks: Ranks, device: torch.device) -> float:
    """Return the sum of a number over all ranks."""
    if ranks.world_size == 1:
        return value
    tensor = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(tensor)
    return tensor.item()


def largest(value: int, ranks: Ranks) -> int:
    """Return the largest of a number over all ranks."""
    if ranks.world_size == 1:
        return value
    tensor = torch.tensor(value, dtype=torch.int64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return int(tensor)


def gather(value: Any, ranks: Ranks) -> list[Any] | None:
    """Return the values of all ranks, in their order, on the first; None elsewhere."""
    if ranks.world_size == 1:
        return [value]
    values = [None] * ranks.world_size if ranks.is_first else None
    dist.gather_object(value, values, dst=0)
    return values


def first_decides(decide: Callable[[], Result], ranks: Ranks) -> Result:
    """Return on every rank what `decide` returns on the first; its UserError is raised on all."""
    if ranks.world_size == 1:
        return decide()
    answer: list[Any] = [None, None]
    if ranks.is_first:
        try:
            answer[0] = decide()
        except UserError as error:
            answer[1] = str(error)
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise UserError(answer[1])
    return answer[0]


def wait_for_all(ranks: Ranks) -> None:
    """Return when all ranks have come here."""
    largest(0, ranks)
