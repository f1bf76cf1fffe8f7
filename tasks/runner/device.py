"""Device, precision and threads: what `auto` means on this machine, and why."""

import contextlib
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from tasks.errors import UserError
from tasks.runner.config.schema import LoopConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True)
class Device:
    """The device a run uses. `precision` is the type of matrix products; weights stay in `master`."""

    device: torch.device
    name: str
    precision: str
    precision_reason: str
    threads: int

    @property
    def master(self) -> torch.dtype:
        """The type of the weights and of the optimizer's state."""
        return torch.float64 if self.precision == "float64" else torch.float32

    def autocast(self) -> contextlib.AbstractContextManager:
        """Return the context for forward passes."""
        if self.precision != "bfloat16":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)


def choose_device(loop: LoopConfig, local_rank: int = 0, local_world: int = 1) -> Device:
    """Resolve `loop.device`, `loop.precision` and `loop.threads`, and set the thread count.

    Raises:
        UserError: a device this machine does not have.
    """
    device = resolve_device(loop.device, local_rank)
    threads = loop.threads or max(1, available_cores() // local_world)
    torch.set_num_threads(threads)
    precision, reason = choose_precision(loop.precision, device)
    return Device(device, device_name(device), precision, reason, threads)


def resolve_device(name: str, local_rank: int) -> torch.device:
    """Return the torch device behind `auto`, `cpu`, `cuda` or `cuda:N`."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in {"cpu", "cuda"}:
        raise UserError(f"loop.device: expected auto, cpu, cuda or cuda:N, got '{name}'")
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = local_rank if device.index is None else device.index
    if index >= count:
        raise UserError(
            f"loop.device: '{name}' asked for, this machine has {count} CUDA devices; use loop.device=cpu"
        )
    return torch.device("cuda", index)


def choose_precision(wanted: str, device: torch.device) -> tuple[str, str]:
    """Return the precision and why. `auto` takes bfloat16 where the device computes it fast."""
    if wanted != "auto":
        return wanted, "asked for"
    if device.type == "cuda":
        if torch.cuda.get_device_capability(device) >= (8, 0):
            return "bfloat16", "GPU with bfloat16 tensor cores"
        return "float32", "GPU without bfloat16 tensor cores"
    fast = cpu_bfloat16_unit()
    return ("bfloat16", f"CPU with {fast}") if fast else ("float32", "CPU without fast bfloat16")


def cpu_bfloat16_unit() -> str | None:
    """Return the CPU's instructions for bfloat16 matrix products, None where it has none."""
    capabilities = torch.backends.cpu.get_cpu_capability()
    if getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)():
        return "AMX"
    if "AVX512" in capabilities and getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)():
        return "AVX-512 BF16"
    return None


def available_cores() -> int:
    """Return how many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def device_name(device: torch.device) -> str:
    """Return the model name of the GPU, or of the CPU where the system tells it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def cpu_name() -> str:
    """Return the CPU's model name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
