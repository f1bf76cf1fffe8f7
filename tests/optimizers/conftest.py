"""One small decoder with every role a text model has, in float64."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from optimizers.config import OptimizerConfig
from xsa_core import GPT, GPTConfig, initialize


@pytest.fixture
def decoder() -> Callable[..., nn.Module]:
    """Return a function that builds the decoder: biases, learned strengths, sinks, grouped queries."""

    def build(**changes: object) -> nn.Module:
        sizes = {
            "vocab_size": 17,
            "max_seq_len": 8,
            "n_layers": 2,
            "d_model": 16,
            "n_heads": 4,
            "n_kv_heads": 2,
        }
        model = GPT(GPTConfig(**{**sizes, "variant": "xsa_learned", "bias": True, "n_sinks": 2, **changes}))
        initialize(model, 0)
        return model.double()

    return build


@pytest.fixture
def settings() -> Callable[..., OptimizerConfig]:
    """Return a function that makes an optimizer's config."""

    def make(name: str = "adamw", **changes: object) -> OptimizerConfig:
        return OptimizerConfig(**{"name": name, "lr": 0.01, "weight_decay": 0.1, **changes})

    return make


@pytest.fixture
def fill() -> Callable[[nn.Module, int], None]:
    """Return a function that gives every parameter a seeded gradient."""

    def gradients(model: nn.Module, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)

    return gradients
