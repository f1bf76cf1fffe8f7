"""The optimizer's share of a training step, for every optimizer of the suite.

One model, one batch, one gradient: each round times the gradient (forward, backward, clipping) once and the
update of every optimizer once, so that a share is a ratio within the round. The optimizers take turns on the
same weights; each has its own state. An update costs the same however many tokens the gradient was of, so a
share holds for the tokens of its row, and shrinks with more.
"""

from typing import Any

import torch
from torch import nn

from optimizers.build import BUILDERS, build_optimizer
from optimizers.config import OptimizerConfig
from tasks.bench.timing import interleave
from xsa_core import GPT, GPTConfig, initialize

BASELINE = "gradient"
RATE = 1e-6  # small: the updates of many rounds must not lead the weights away

# About 10 and 100 million parameters, all but a few in hidden matrices.
SIZES: dict[str, dict[str, int]] = {
    "10 M": {"vocab_size": 256, "n_layers": 6, "n_heads": 6, "d_model": 384},
    "100 M": {"vocab_size": 256, "n_layers": 14, "n_heads": 12, "d_model": 768},
}


class Gradient:
    """A model with a batch of random tokens; a call makes the gradient of its loss.

    Args:
        autocast: returns the context of the forward pass.
    """

    def __init__(self, model: GPT, batch: int, length: int, device: torch.device, autocast: Any) -> None:
        self.model, self.autocast = model.to(device), autocast
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(model.config.vocab_size, (batch, length + 1), generator=generator).to(device)
        self.inputs, self.targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()  # B T each

    def __call__(self) -> None:
        """Leave a fresh gradient in every parameter."""
        self.model.zero_grad(set_to_none=True)
        with self.autocast():
            loss = self.model(self.inputs, self.targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)


def share(ratio: float) -> float:
    """Return an update's share of the whole step from its time over the gradient's."""
    return ratio / (1.0 + ratio)


def measure(
    sizes: dict[str, int], batch: int, length: int, device: torch.device, autocast: Any, rounds: int
) -> list[dict[str, Any]]:
    """Return one row per optimizer: times in milliseconds, and its share of the step with a 95% interval."""
    model = GPT(GPTConfig(variant="sa", max_seq_len=length, **sizes))
    initialize(model, seed=0)
    gradient = Gradient(model, batch, length, device, autocast)
    gradient()  # the first round may begin with an update
    optimizers = {name: build_optimizer(model, OptimizerConfig(name=name, lr=RATE)).step for name in BUILDERS}
    times = interleave({BASELINE: gradient, **optimizers}, rounds, BASELINE, device)
    rows = []
    for name in optimizers:
        # Fewer than six rounds give no 95% interval of a median.
        low, high = times[name].interval if rounds >= 6 else (None, None)
        rows.append(
            {
                "size": f"{model.num_parameters() / 1e6:.1f} M",
                "tokens": batch * length,
                "optimizer": name,
                "update_milliseconds": 1e3 * times[name].median_seconds,
                "gradient_milliseconds": 1e3 * times[BASELINE].median_seconds,
                "share": share(times[name].ratio),
                "share_low": share(low) if low is not None else None,
                "share_high": share(high) if high is not None else None,
                "rounds": rounds,
            }
        )
    return rows
