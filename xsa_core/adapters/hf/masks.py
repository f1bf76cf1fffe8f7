"""Masks of transformers: what `xsa_flash` asks for, and what the fused operator is given.

Axes: B batch, T queries, S keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from xsa_core.adapters.layer import additive


def flash_style_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The mask of `xsa_flash`: None where causal attention, the queries last, is all there is to it.

    Arguments as of transformers' mask functions.

    Returns:
        None, or bool `B 1 T S`, True is visible.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    mask_function = causal_mask_function if mask_function is None else mask_function
    named = mask_function is causal_mask_function and kwargs.get("allow_is_causal_skip", True)
    known = isinstance(q_offset, int) and not torch.compiler.is_compiling()
    if named and known and q_offset + q_length == kv_offset + kv_length:
        seen = None if attention_mask is None else attention_mask[:, -kv_length:]
        if seen is None or (seen.shape[1] == kv_length and bool(seen.all())):
            return None
    kwargs["allow_is_causal_skip"] = False
    return sdpa_mask(
        batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **kwargs
    )


def dense_bias(
    attention_mask: Tensor | None, position_bias: Tensor | None, dtype: torch.dtype, S: int
) -> Tensor | None:
    """Mask (bool, True is visible, or additive) and position bias together, as added to the logits."""
    bias = additive(attention_mask, dtype)
    if position_bias is None:
        return bias
    position_bias = position_bias[..., :S]
    return position_bias if bias is None else bias + position_bias
