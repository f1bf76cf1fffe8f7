"""Which cores and which GPU a cell gets, where several run at once on one machine.

Each cell has cores of its own: threads of two runs on one core wait for each other, and cost both more than
the second one gains. All cells get the same number of cores, because the number of threads decides how sums
are rounded, and the two runs of a pair should round alike.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks.errors import UserError
from tasks.runner.config.schema import RunConfig

TOPOLOGY = Path("/sys/devices/system/cpu")
NVIDIA = Path("/proc/driver/nvidia/gpus")
GPUS = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Slot:
    """Room for one cell. Without cores it may use what the sweep may; `gpu` is a name as CUDA takes it."""

    cores: tuple[int, ...] = ()
    gpu: str | None = None

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables that keep a process to this slot, beside the cores it is pinned to."""
        return {GPUS: self.gpu} if self.gpu is not None else {}


def divide(jobs: int, configs: Sequence[RunConfig]) -> list[Slot]:
    """Return as many slots as cells are to run at once.

    Raises:
        UserError: fewer than one job, more than there are cores or GPUs, or runs whose threads exceed a slot.
    """
    if jobs < 1:
        raise UserError(f"--jobs: expected a number of at least 1, got {jobs}")
    if jobs == 1:
        return [Slot()]
    if not hasattr(os, "sched_setaffinity"):
        raise UserError("--jobs: this system cannot keep a process to cores of its own; leave it at 1")
    cores = by_neighbourhood(os.sched_getaffinity(0))
    each = len(cores) // jobs
    if not each:
        raise UserError(
            f"--jobs: {jobs} cells need a core each, this process may use {len(cores)}; give at most that"
        )
    greedy = max((config.loop.threads for config in configs), default=0)
    if greedy > each:
        raise UserError(
            f"--jobs: loop.threads={greedy} is more than the {each} of {len(cores)} cores that each of "
            f"{jobs} cells gets; leave it at 0, or give fewer jobs"
        )
    cards: Sequence[str | None] = gpus() if any(config.loop.device != "cpu" for config in configs) else []
    if cards and jobs > len(cards):
        raise UserError(
            f"--jobs: {jobs} cells need a GPU each, there are {len(cards)}; give at most that, or "
            "loop.device=cpu"
        )
    parts = [tuple(cores[each * number : each * (number + 1)]) for number in range(jobs)]
    return [Slot(part, cards[number] if cards else None) for number, part in enumerate(parts)]


def by_neighbourhood(cores: set[int]) -> list[int]:
    """Return cores so that the threads of one physical core are neighbours: they should not be divided."""

    def place(core: int) -> tuple[int, int, int]:
        return fact(core, "physical_package_id"), fact(core, "core_id"), core

    return sorted(cores, key=place)


def fact(core: int, name: str) -> int:
    """Return a number that Linux tells about a core, 0 where it tells none."""
    try:
        return int((TOPOLOGY / f"cpu{core}" / "topology" / name).read_text())
    except (OSError, ValueError):
        return 0


def gpus() -> list[str]:
    """Return the NVIDIA GPUs this process may use, without loading torch for it; none on other machines."""
    if GPUS in os.environ:
        return [name.strip() for name in os.environ[GPUS].split(",") if name.strip()]
    return [str(number) for number in range(len(list(NVIDIA.glob("*"))))]
