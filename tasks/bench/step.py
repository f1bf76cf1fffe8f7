"""A whole training step of a GPT: plain, with the two lines, and with the fused operator.

Each candidate is a model of its own with the same initial weights and its own optimizer, trained on the
same batch: forward, backward, clipping, AdamW.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tasks.bench.memory import SavedBytes, peak_extra_bytes
from tasks.bench.peers import with_two_lines
from tasks.bench.timing import interleave
from xsa_core import GPT, GPTConfig, initialize

BASELINE = "plain"


class Step:
    """One model with its optimizer and a batch."""

    def __init__(self, model: GPT, batch: int, length: int, precision: str, device: torch.device) -> None:
        self.model = model.to(device)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(model.config.vocab_size, (batch, length + 1), generator=generator).to(device)
        self.inputs, self.targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        self.autocast = lambda: torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16")

    def forward(self) -> torch.Tensor:
        """Return the loss."""
        with self.autocast():
            return self.model(self.inputs, self.targets)

    def __call__(self) -> None:
        """Make one update."""
        self.optimizer.zero_grad(set_to_none=True)
        self.forward().backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def saved_bytes(self) -> int:
        """Return what the forward keeps for the backward, parameters and batch left out."""
        counter = SavedBytes(self.inputs, self.targets, *self.model.parameters())
        with counter.counting():
            self.forward()
        return counter.total


def build(sizes: dict[str, int], variant: str) -> GPT:
    """Return a GPT of the given sizes, always with the same initial weights."""
    model = GPT(GPTConfig(variant=variant, **sizes))
    initialize(model, seed=0)
    return model


BUILDERS: dict[str, Callable[[dict[str, int]], GPT]] = {
    "plain": lambda sizes: build(sizes, "sa"),
    "two lines": lambda sizes: with_two_lines(build(sizes, "sa")),
    "fused": lambda sizes: build(sizes, "xsa"),
}


def measure(
    sizes: dict[str, int], batch: int, precision: str, device: torch.device, rounds: int
) -> list[dict[str, Any]]:
    """Return one row per candidate: step time, tokens/s, ratio to plain, saved and peak bytes."""
    length = sizes["max_seq_len"]
    steps = {
        name: Step(builder(sizes), batch, length, precision, device) for name, builder in BUILDERS.items()
    }
    times = interleave(steps, rounds, BASELINE, device)
    rows = []
    for name, step in steps.items():
        low, high = times[name].interval
        rows.append(
            {
                "model": f"{step.model.num_parameters() / 1e6:.1f} M",
                "batch": batch,
                "length": length,
                "precision": precision,
                "attention": name,
                "milliseconds": 1e3 * times[name].median_seconds,
                "tokens_per_second": batch * length / times[name].median_seconds,
                "ratio": times[name].ratio,
                "ratio_low": low,
                "ratio_high": high,
                "saved_bytes": step.saved_bytes(),
                "peak_bytes": peak_extra_bytes(step, device),
                "rounds": rounds,
            }
        )
    return rows
