"""The attention operator alone: plain, with the two lines (eager and compiled), and fused.

Axis legend: B batch, T tokens, H heads, D channels of a head. q, k and v are views of one fused
projection, as they are in a model; the gradient goes back into that projection's output.
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from tasks.bench import peers
from tasks.bench.memory import SavedBytes, peak_extra_bytes
from tasks.bench.timing import interleave
from xsa_core import exclusive_attention
from xsa_core.attention import BACKENDS

BASELINE = "plain"
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    """One cell: sizes, dtype, and the sweep it belongs to."""

    sweep: str
    batch: int
    length: int
    heads: int
    head_dim: int
    dtype: str


def target_shapes() -> list[Shape]:
    """Return the shapes the project's targets are stated for."""
    return [
        Shape("target", 4, length, 8, 64, dtype)
        for length in (512, 2048)
        for dtype in ("float32", "bfloat16")
    ]


def sweep_shapes(lengths: Iterable[int], tokens: int, batch: int, widths: Iterable[int]) -> list[Shape]:
    """Return lengths at fixed tokens, lengths at fixed batch (paper, Figure 2), and widths; in bf16."""
    lengths = list(lengths)
    fixed_tokens = [Shape("fixed tokens", max(1, tokens // n), n, 8, 64, "bfloat16") for n in lengths]
    fixed_batch = [Shape("fixed batch", batch, n, 8, 64, "bfloat16") for n in lengths]
    by_width = [Shape("width", 4, 512, heads, 64, "bfloat16") for heads in widths]
    return fixed_tokens + fixed_batch + by_width


def candidates(with_compiled: bool, extra: dict[str, Attention] | None = None) -> dict[str, Attention]:
    """Return the attentions to compare. `plain` and `fused` use the same kernel.

    `extra` are further ones; by default XSA through xformers, where that can run.
    """

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return exclusive_attention(q, k, v, causal=True, strength=None)

    def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return exclusive_attention(q, k, v, causal=True)

    found: dict[str, Attention] = {
        "plain": plain,
        "torch": peers.torch_attention,
        "two lines": peers.two_line_attention,
        "fused": fused,
    }
    if with_compiled:
        found["two lines, compiled"] = peers.compiled(peers.two_line_attention)
    if extra is None:
        extra = {name: by_backend(name) for name in ("xformers",) if BACKENDS[name].unavailable() is None}
    return found | extra


def by_backend(name: str) -> Attention:
    """Return causal XSA by the named backend."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return exclusive_attention(q, k, v, causal=True, backend=name)

    return attention


class Problem:
    """Inputs and the upstream gradient of one shape."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        options = {"device": device, "dtype": getattr(torch, shape.dtype)}
        sizes = (shape.batch, shape.length)
        wide = (*sizes, 3 * shape.heads, shape.head_dim)
        self.qkv = torch.randn(wide, generator=generator, **options).requires_grad_()
        self.upstream = torch.randn(*sizes, shape.heads, shape.head_dim, generator=generator, **options)
        self.heads = shape.heads

    def forward(self, attention: Attention) -> Tensor:
        """Return the attention's output, `B T H D`."""
        return attention(*self.qkv.split(self.heads, dim=2))

    def both(self, attention: Attention) -> None:
        """Run forward and backward."""
        self.qkv.grad = None
        self.forward(attention).backward(self.upstream)

    def saved_bytes(self, attention: Attention) -> int:
        """Return what is kept between forward and backward, besides the inputs, as an output projection
        would: the output itself is kept by the layer that follows, so it counts in any case."""
        counter = SavedBytes(self.qkv)
        with counter.counting():
            output = self.forward(attention)
        storage = output.untyped_storage()
        counter.storages[storage.data_ptr()] = storage.nbytes()
        return counter.total


def measure(
    shape: Shape, device: torch.device, rounds: int, attentions: dict[str, Attention]
) -> list[dict[str, Any]]:
    """Return one row per candidate: times, ratio to plain with its interval, saved and peak bytes.

    Backends that do not run on the device are left out.
    """
    attentions = {
        name: attention
        for name, attention in attentions.items()
        if name not in BACKENDS or device.type in BACKENDS[name].devices
    }
    problem = Problem(shape, device)
    calls = {
        name: (lambda attention=attention: problem.both(attention)) for name, attention in attentions.items()
    }
    times = interleave(calls, rounds, BASELINE, device)
    rows = []
    for name, attention in attentions.items():
        low, high = times[name].interval
        rows.append(
            {
                **asdict(shape),
                "attention": name,
                "milliseconds": 1e3 * times[name].median_seconds,
                "ratio": times[name].ratio,
                "ratio_low": low,
                "ratio_high": high,
                "saved_bytes": problem.saved_bytes(attention),
                "peak_bytes": peak_extra_bytes(calls[name], device),
                "rounds": rounds,
            }
        )
    return rows
