"""Small layers with logits of order one, and inputs, for the tests of the attention layer."""

import torch

from xsa_core.attention.module import SelfAttention
from xsa_core.initialization import initialize

EPS = torch.finfo(torch.float64).eps
TOLERANCE = {"rtol": 0, "atol": 200 * EPS}  # sums of some dozen terms of size about one, a few in a row


def make_layer(d_model=16, n_heads=4, seed=0, spread=40.0, dtype=torch.float64, **options):
    """A layer with logits of order one: the rule of initialisation leaves attention nearly uniform."""
    layer = SelfAttention(d_model, n_heads, **options).to(dtype)
    initialize(layer, seed)
    with torch.no_grad():
        for name, p in layer.named_parameters():
            if ("weight" in name and p.ndim == 2) or "sink" in name:
                p.mul_(spread)
            elif "raw_strength" in name:
                p.copy_(torch.linspace(-1.5, 2.0, p.numel()))
            elif "gain" in name:
                p.copy_(torch.linspace(0.5, 2.0, p.numel()).view_as(p))
    return layer


def inputs(B, T, C, seed=1, dtype=torch.float64):
    return torch.randn(B, T, C, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
