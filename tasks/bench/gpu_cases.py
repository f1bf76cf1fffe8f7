"""What the GPU script checks before it measures: the cases, their inputs, and how attention is called.

Axis legend: B batch, T tokens, H heads, Hkv key/value heads, D channels of a head, N sinks.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from xsa_core.attention.masks import Mask

SIZES = ((130, 4, 4, 64), (127, 8, 2, 128), (1, 2, 2, 64))  # T, H, Hkv, D
# What else the default kernels do: each kind with the dtypes it is checked in, at the second of the sizes.
KINDS = {
    "learned strength": ("bfloat16", "float32"),
    "sinks": ("bfloat16",),
    "bias": ("bfloat16", "float32"),
    "padding": ("bfloat16",),
    "window": ("bfloat16",),
}
# Of the backends that are compiled anew for every case, only so much is checked.
COMPILED = {"flex": {"dtypes": {"bfloat16"}, "lengths": {130, 127}}}
BATCH = 2


def cases(backends: list[str], device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield the cases whose output and gradients are compared with float64, those of the default first."""
    dtypes = ("float32", "bfloat16", "float16") if device.type == "cuda" else ("float32", "bfloat16")
    for backend in backends:
        for dtype in dtypes:
            for length, heads, kv_heads, head_dim in SIZES:
                limits = COMPILED.get(backend)
                if limits and (dtype not in limits["dtypes"] or length not in limits["lengths"]):
                    continue
                sizes = {"length": length, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
                yield {"backend": backend, "dtype": dtype, "kind": "causal", **sizes}
        if backend == "sdpa":
            sizes = dict(zip(("length", "heads", "kv_heads", "head_dim"), SIZES[1], strict=True))
            for kind, wanted in KINDS.items():
                yield from ({"backend": backend, "dtype": dtype, "kind": kind, **sizes} for dtype in wanted)


def tensors(case: dict[str, Any]) -> tuple[list[Tensor], Tensor]:
    """The differentiable inputs of a case, q, k, v first, and the upstream gradient; float64 on the CPU."""
    generator = torch.Generator().manual_seed(0)
    T, H, Hkv, D = (case[name] for name in ("length", "heads", "kv_heads", "head_dim"))

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    # Values have a common part, as trained ones do.
    made = [draw(BATCH, T, H, D), draw(BATCH, T, Hkv, D), draw(BATCH, T, Hkv, D) + draw(1, 1, Hkv, D)]
    if case["kind"] == "learned strength":
        made.append(draw(H))
    elif case["kind"] == "sinks":
        made += [draw(3, Hkv, D), draw(3, Hkv, D)]
    elif case["kind"] == "bias":
        made.append(draw(BATCH, H, T, T))
        made[-1][:, :, 2] = made[-1][:, 0, 5, 1:] = -torch.inf  # a row that sees nothing, one that sees a key
    return made, draw(BATCH, T, H, D)


def options(case: dict[str, Any], extra: tuple[Tensor, ...], device: torch.device) -> dict[str, Any]:
    """Keyword arguments of `exclusive_attention` for a case; `extra` are its inputs after q, k and v."""
    kind, T = case["kind"], case["length"]
    if kind == "bias":
        return {"bias": extra[0]}
    if kind == "padding":
        real = torch.arange(T, device=device)[None] < torch.tensor([[T], [T // 2]], device=device)
        return {"mask": Mask.padding(real)}
    if kind == "window":
        return {"mask": Mask.window(17), "causal": True}
    return {
        "causal": {"causal": True},
        "learned strength": {"causal": True, "strength": extra[0].tanh() if extra else None},
        "sinks": {"causal": True, "sinks": extra},
    }[kind]
