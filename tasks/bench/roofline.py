"""What a device can do at best, measured: copying memory and multiplying matrices."""

from collections.abc import Callable
from statistics import median

import torch

from tasks.bench.timing import timed

REPEATS = 10


def best_seconds(function: Callable[[], object], device: torch.device) -> float:
    """Return the median time of a call after two that are not counted."""
    for _ in range(2):
        timed(function, device)
    return median(timed(function, device) for _ in range(REPEATS))


def copy_bandwidth(device: torch.device, size: int) -> float:
    """Return bytes per second, read and written, of a copy of `size` bytes."""
    source = torch.empty(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / best_seconds(lambda: target.copy_(source), device)


def matrix_rate(device: torch.device, size: int, dtype: torch.dtype) -> float:
    """Return floating-point operations per second of a product of two square matrices."""
    a = torch.randn(size, size, device=device).to(dtype)
    b = torch.randn(size, size, device=device).to(dtype)
    return 2 * size**3 / best_seconds(lambda: a @ b, device)


def attention_flops(batch: int, length: int, heads: int, head_dim: int) -> int:
    """Return the operations of causal attention, forward and backward: two products of half a T x T
    matrix with D columns forward, five backward (the backward forms the weights once more)."""
    products = 2 + 5
    return products * 2 * batch * heads * length * length * head_dim // 2
