"""Peak memory of a stretch of work: allocated bytes on a GPU, resident bytes of the process on a CPU."""

import resource
import sys
from pathlib import Path

import torch


def reset_peak(device: torch.device) -> None:
    """Start a new measurement, where the system allows it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM (Linux)
    except OSError:
        return


def peak_bytes(device: torch.device) -> int:
    """Return the peak since the last reset (where it cannot be reset: since the process started)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
