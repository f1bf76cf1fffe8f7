"""Interleaved timing: every round runs each candidate once, in an order that changes, and the ratio is
taken within the round. What disturbs the machine for longer than a round disturbs both sides alike.
"""

import gc
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

import torch


@dataclass(frozen=True)
class Timing:
    """Seconds of one candidate, a value per round, and its ratios to the baseline of the same round."""

    seconds: list[float]
    ratios: list[float]

    @property
    def median_seconds(self) -> float:
        """The median time."""
        return median(self.seconds)

    @property
    def ratio(self) -> float:
        """The median ratio to the baseline."""
        return median(self.ratios)

    @property
    def interval(self) -> tuple[float, float]:
        """A 95% interval of the median ratio from order statistics: no assumption on its distribution."""
        return median_interval(self.ratios)


def median_interval(values: list[float]) -> tuple[float, float]:
    """Return the distribution-free 95% interval of the median: ranks n/2 -+ 0.98 sqrt(n).

    With fewer than six values no such interval exists; the whole range is returned.
    """
    ordered, count = sorted(values), len(values)
    if count < 6:
        return ordered[0], ordered[-1]
    low = max(0, math.floor(count / 2 - 0.98 * math.sqrt(count)) - 1)
    return ordered[low], ordered[count - 1 - low]


def interleave(
    candidates: Mapping[str, Callable[[], object]],
    rounds: int,
    baseline: str,
    device: torch.device,
    warmup: int = 2,
) -> dict[str, Timing]:
    """Time the candidates over `rounds` rounds, after `warmup` rounds that are not counted.

    Each round starts with another candidate, so that none always follows the same one; garbage is
    collected between rounds and never inside one.
    """
    names = list(candidates)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(-warmup, rounds):
        gc.collect()
        gc.disable()
        try:
            for place in range(len(names)):
                name = names[(place + round_) % len(names)]
                spent = timed(candidates[name], device)
                if round_ >= 0:
                    seconds[name].append(spent)
        finally:
            gc.enable()
    base = seconds[baseline]
    return {
        name: Timing(spent, [own / other for own, other in zip(spent, base, strict=True)])
        for name, spent in seconds.items()
    }


def timed(function: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one call: by CUDA events on a GPU, by the clock elsewhere."""
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        torch.cuda.synchronize(device)
        return start.elapsed_time(end) / 1e3
    start_time = time.perf_counter()
    function()
    return time.perf_counter() - start_time
