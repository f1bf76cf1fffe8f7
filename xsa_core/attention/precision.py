"""Autocast at the border of the operators: inputs take its dtype, the arithmetic inside does not.

Within the operators sums are in the accumulation type on purpose (float32 for the half types); autocast would
turn their matrix products back into half precision, and the log-sum-exp with them.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype autocast asks for on ``device``, or None where it is off or the device has none (meta)."""
    kind = device.type
    # A traced graph cannot ask whether a device has autocast; those that compile have it.
    if not torch.compiler.is_compiling() and not torch.amp.is_autocast_available(kind):
        return None
    if not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager:
    """A context in which autocast is off on ``device``; costs nothing where it is off already."""
    if autocast_dtype(device) is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def bias_as(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """The bias in another dtype; a finite entry below its range becomes its lowest number, never -inf, which
    would hide the key instead of disfavouring it."""
    if bias.dtype == dtype:
        return bias
    cast = bias.to(dtype)
    return cast.masked_fill_((cast == -torch.inf) & (bias != -torch.inf), torch.finfo(dtype).min)
