"""Averaged weights: an exponential moving average that is evaluated in place of the last weights.

torch's own AveragedModel does the averaging; what is here decides when there is one, and which weights of a
checkpoint a reader wants.
"""

from typing import Any

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tasks.runner.sharding import is_sharded

AVERAGE = "average"  # of a checkpoint's content; "model" has the last weights


def averaged(model: nn.Module, decay: float) -> AveragedModel | None:
    """Return the average of a model's weights, starting at what they are; None for decay 0.

    Raises:
        ValueError: weights in shards.
    """
    if not decay:
        return None
    if is_sharded(model):
        raise ValueError("loop.ema: averages are not kept of sharded weights; take loop.strategy=ddp")
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=False)


def trained_weights(content: dict[str, Any]) -> dict[str, Tensor]:
    """Return the weights that a checkpoint's evaluation is about: the averaged ones where there are some."""
    average = content.get(AVERAGE)
    if not average:
        return content["model"]
    prefix = "module."
    return {name.removeprefix(prefix): value for name, value in average.items() if name.startswith(prefix)}
