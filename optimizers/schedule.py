"""Learning-rate schedules: pure functions of the step, shared by all groups."""

import math

import torch


def lr_factor(step: int, max_steps: int, warmup_steps: int, final_fraction: float) -> float:
    """Return the learning rate at `step` (0-based) over its peak: linear warm-up, then a cosine.

    The warm-up's first step has 1 / warmup_steps, its last the peak; the last step of the run has
    `final_fraction`. The paper: 2,000 steps of warm-up, cosine to a tenth.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, max_steps - 1 - warmup_steps))
    return final_fraction + (1 - final_fraction) * 0.5 * (1 + math.cos(math.pi * progress))


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set every group's rate to `factor` times its peak."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor
