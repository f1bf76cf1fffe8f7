"""Memory of one call: what autograd keeps for the backward, and the peak while it runs."""

import contextlib
import ctypes
import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor


class SavedBytes:
    """Bytes kept for the backward: each storage once, tensors that live anyway left out."""

    def __init__(self, *known: Tensor) -> None:
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.storages: dict[int, int] = {}

    @property
    def total(self) -> int:
        """The sum of all kept storages, in bytes."""
        return sum(self.storages.values())

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count what is saved in the block."""

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self.known:
                self.storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield


def peak_extra_bytes(function: Callable[[], object], device: torch.device) -> int | None:
    """Return how far memory rises above its level before the call, in bytes.

    On a GPU from the allocator; on Linux from the resident set, after the heap's free pages have been
    handed back. None where neither can be had.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
        before = status_bytes("VmRSS")
        function()
        return max(0, status_bytes("VmHWM") - before)
    except (OSError, AttributeError):
        return None


def status_bytes(field: str) -> int:
    """Return a field of /proc/self/status in bytes. Raises OSError where there is none."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {field} in /proc/self/status")
