"""Training and evaluation mode of a model, put back as they were."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for the block; afterwards every module has its own mode again (parts may be frozen)."""
    before = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training
