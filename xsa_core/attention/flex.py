"""FlexAttention: block-sparse masks on CUDA. It has no backward to call on its own, so exclusion follows as a
pass.

B batch   T queries   S keys   H query heads   Hkv key/value heads   Dk, Dv head sizes
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from xsa_core.attention.masks import Mask

RECOMPILE_LIMIT = 64

# Block masks are costly to make and serve all layers of a model.
_BLOCK_MASKS: weakref.WeakKeyDictionary[Mask, dict[tuple[Any, ...], Any]] = weakref.WeakKeyDictionary()


def mask_mod(mask: Mask, T: int, S: int, device: torch.device | str) -> Callable[..., Tensor]:
    """The mask as a function of (batch, head, query row, key), True = visible; the same rules as
    Mask.to_dense.

    Raises:
        ValueError: for ``exclude_self``, which depends on a whole row.
    """
    if mask.exclude_self:
        raise ValueError("FlexAttention has no exclude_self mask; use backend='sdpa'")
    offset, causal, window = S - T, mask.causal_rule, mask.window_size
    prefix = None
    if mask.prefix_lengths is not None:
        prefix = torch.as_tensor(mask.prefix_lengths, device=device).reshape(-1)
    documents = [ids.to(device) for ids in mask.document_ids]
    padding = None if mask.key_padding is None else mask.key_padding.to(device)
    force_self = T == S or mask.positional

    def row(tensor: Tensor, b: Tensor) -> Tensor:
        return b if tensor.shape[0] != 1 else b * 0

    def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        position = query + offset
        seen = position >= -1
        if causal:
            seen = seen & (position >= key)
        if prefix is not None:
            seen = seen | (key < prefix[row(prefix, b)])
        if window is not None:
            seen = seen & ((position - key).abs() < window)
        for ids in documents:
            seen = seen & (ids[row(ids, b), position] == ids[row(ids, b), key])
        if padding is not None:
            seen = seen & padding[row(padding, b), key]
        return seen | (position == key) if force_self else seen

    return visible


def block_mask(mask: Mask, B: int, T: int, S: int, device: torch.device) -> Any:
    """FlexAttention's block mask, or None where everything is visible."""
    from torch.nn.attention.flex_attention import create_block_mask

    mask.check(B, T, S)
    if not mask.features:
        return None
    made = _BLOCK_MASKS.setdefault(mask, {})
    key = (B, T, S, str(device))
    if key not in made:
        per_batch = mask.features & {"padding", "prefix", "documents"}
        made[key] = create_block_mask(
            mask_mod(mask, T, S, device), B if per_batch else None, None, T, S, device
        )
    return made[key]


@functools.cache
def _compiled() -> Callable[..., Any]:
    """FlexAttention is only fast, and only sparse, when compiled; a traced graph compiles it anyway.

    Every length and dtype is a compilation of its own. The compiler gives up after 8 of one function and
    would go on without compiling, so the limit of this process is raised.
    """
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.recompile_limit = max(RECOMPILE_LIMIT, torch._dynamo.config.recompile_limit)
    return torch.compile(flex_attention, dynamic=False)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None) -> tuple[Tensor, Tensor]:
    """Plain attention by FlexAttention.

    Args:
        q: (B, T, H, Dk). k: (B, S, Hkv, Dk). v: (B, S, Hkv, Dv).
        mask: any without ``exclude_self``.
        scale: of the logits, 1/sqrt(Dk) by default.

    Returns:
        y (B, T, H, Dv) and the log-sum-exp (B, H, T), both differentiable.
    """
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    (B, T), S = q.shape[:2], k.shape[1]
    run = _compiled() if q.is_cuda and not torch.compiler.is_compiling() else flex_attention
    y, extra = run(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        block_mask=block_mask(mask, B, T, S, q.device),
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
        return_aux=AuxRequest(lse=True),
    )
    return y.transpose(1, 2).contiguous(), extra.lse
