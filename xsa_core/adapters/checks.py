"""What :func:`xsa_core.convert` and its like are given: read as people write it, or refused in one line."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from xsa_core.adapters.base import Found, Settings


def check_model(model: nn.Module) -> None:
    """Refuse what is no model."""
    if isinstance(model, nn.Module):
        return
    if isinstance(model, type):
        raise ValueError(f"expected a model, got the class {model.__name__}: make an instance of it first")
    raise ValueError(f"expected a model (torch.nn.Module), got {type(model).__name__}")


def as_number(strength: Any) -> Any:
    """Real numbers of any library, and arrays of none, as a float; anything else as it is."""
    kind = strength.item() if getattr(strength, "ndim", None) == 0 else strength
    return float(kind) if isinstance(kind, numbers.Real) else strength


def as_indices(layers: Any) -> list[Any]:
    """Indices of any integral type as int; what is none stays as it is, and is refused by name."""
    expected = 'expected "all", "first:k", "last:k", a list of layer indices, or a function of the path'
    known = isinstance(layers, Iterable) and not isinstance(layers, bytes | dict)
    if not known or getattr(layers, "ndim", 1) == 0:
        raise ValueError(f"layers {layers!r} not understood: {expected}")
    rows = layers.tolist() if hasattr(layers, "tolist") else list(layers)
    rows = [i.item() if getattr(i, "ndim", None) == 0 else i for i in rows]
    return [int(i) if isinstance(i, numbers.Integral) and not isinstance(i, bool) else i for i in rows]


def refuse_wrapped(model: nn.Module, fresh: Sequence[Found], settings: Settings) -> None:
    """DDP has counted the parameters already, and FSDP has exchanged classes itself."""
    adds = settings.variant in ("xsa_learned", "head_norm", "random_direction")
    for path, module in model.named_modules():
        wrapped = _is_a(module, "FSDPModule") or (adds and _is_a(module, "DistributedDataParallel"))
        if fresh and wrapped:
            raise ValueError(
                f"{path or 'the model'} is wrapped for distributed training already: convert the model first"
            )


def refuse_sharded(found: Sequence[Found]) -> None:
    """The plain class would put the sharding off with the exclusion."""
    for f in found:
        if _is_a(f.module, "FSDPModule"):
            raise ValueError(
                f"{f.path or 'the model'} is sharded: set_strength(model, 0) makes it plain, or revert the "
                "model before it is sharded"
            )


def refuse_changed(found: Sequence[Found]) -> None:
    """A class that was exchanged again after the conversion would be lost with ours."""
    for f in found:
        if "original" not in vars(type(f.module)):
            raise ValueError(
                f"{f.path or 'the model'} became a {type(f.module).__name__} after the conversion (as by "
                "register_parametrization): undo that first; set_strength(model, 0) makes the model plain"
            )


def _is_a(module: nn.Module, name: str) -> bool:
    """By name, since the classes are slow to import."""
    return any(cls.__name__ == name for cls in type(module).__mro__)
