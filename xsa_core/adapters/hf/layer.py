"""A converted attention module of transformers: its own forward, with the own values caught on the way.

The attention function of transformers gets keys and values *after* the cache has taken them: a static cache
hands over its whole buffer, a sliding one what is left of the past, a beam's cache reordered rows. The values
of the new tokens themselves pass through exactly one place, the `update` of the cache, so that is where they
are taken.
"""

from __future__ import annotations

import functools
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from xsa_core.adapters.hf.classes import foreign_arguments
from xsa_core.adapters.layer import ConvertedLayer

# Converted modules of every model, since models may share the config that names their attention function.
CONVERTED: weakref.WeakSet[nn.Module] = weakref.WeakSet()

WANTED = "_xsa_own_values"  # on a cache, while a converted layer runs with it


@dataclass
class OwnValues:
    """What one forward of a converted module knows of the values of its tokens.

    Attributes:
        values: `B Hkv T D`, given to the cache; None without a cache.
        returned: `B Hkv S D`, what the cache gave back for them.
        start: where they lie among the S, a number on the device; None where they are the last.
        cross: keys come from other tokens.
        taken: whether one of our attention functions asked for them.
    """

    values: Tensor | None = None
    returned: Tensor | None = None
    start: Tensor | None = None
    cross: bool = False
    taken: bool = False

    def of(self, value: Tensor, T: int) -> Tensor:
        """Rows `B Hkv T D` of the query tokens, of the values `B Hkv S D` that attention uses.

        What the cache gave back may be what it holds values in rather than values (the latents of multi-head
        latent attention); then the rows are taken from what the model made of it.
        """
        if self.values is None:
            return value
        if value is self.returned:
            return self.values
        assert self.returned is not None
        if value.shape[2] != self.returned.shape[2]:
            return value  # more than the cache holds: where the own ones are is not known, which is refused
        if self.start is None:
            return value[:, :, value.shape[2] - T :]
        rows = torch.arange(T, device=value.device) + self.start.to(value.device)
        return value.index_select(2, rows)


def recording(update: Any, static: type) -> Any:
    """The `update` of transformers' caches, leaving the new values where a running layer asked for them.

    Args:
        update: the method. static: class of the cache layers that give back a whole buffer.
    """

    @functools.wraps(update)
    def recorded(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        own = getattr(self, WANTED, None)
        if own is not None:
            layer = self.layers[layer_idx] if layer_idx < len(self.layers) else None
            own.start = _start(layer, value_states.shape[2]) if isinstance(layer, static) else None
        result = update(self, key_states, value_states, layer_idx, *args, **kwargs)
        if own is not None:
            own.values, own.returned = value_states, result[1]
        return result

    return recorded


def _start(layer: Any, T: int) -> Tensor | None:
    """Where the next T tokens go in the buffer of a static cache; None where it gives them back last."""
    if layer.is_sliding and layer.cumulative_length_int + T > layer.max_cache_len:
        return None
    return layer.cumulative_length.clone()


class InterfaceLayer(ConvertedLayer):
    """A module that calls the attention function of transformers; the rest of its forward is its own."""

    calls: dict[int, OwnValues]  # by thread, so that one model can serve several

    def exclusive_forward(self, *args: Any, **kwargs: Any) -> Any:
        """The library's forward; its attention function finds the own values in `calls`.

        Raises:
            ValueError: another attention function ran, which is plain.
        """
        plain = super(ConvertedLayer, self).forward  # type: ignore[misc]
        own = OwnValues(cross=self._is_cross(args, kwargs))
        cache = None if own.cross else _cache(args, kwargs)
        here = thread()
        self.calls[here] = own
        if cache is not None:
            setattr(cache, WANTED, own)
        try:
            result = plain(*args, **kwargs)
        finally:
            if cache is not None:
                setattr(cache, WANTED, None)
            del self.calls[here]
        if not (own.taken or own.cross):
            raise ValueError(
                f"{type(self).original.__name__} is exclusive, and its config names the attention function "
                f"{self.config._attn_implementation!r}, which is plain: choose one by "  # type: ignore[attr-defined]
                "model.set_attn_implementation(...), or call xsa_core.revert(model)"
            )
        return result

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Unpickled in another process, the names in the configs must be known there."""
        from xsa_core.adapters.hf.install import install

        install()
        super().__setstate__(state)  # type: ignore[misc]
        CONVERTED.add(self)  # type: ignore[arg-type]

    def _is_cross(self, args: tuple, kwargs: dict) -> bool:
        for place, name in foreign_arguments(type(self).original):
            given = kwargs.get(name) if name in kwargs else (args[place] if place < len(args) else None)
            if given is not None:
                return True
        return False


def holders(config: Any, but: nn.Module) -> bool:
    """Whether converted modules outside a model hold its config."""
    inside = {id(module) for module in but.modules()}
    return any(getattr(m, "config", None) is config and id(m) not in inside for m in CONVERTED)


def thread() -> int:
    """Key of the running thread; a traced graph knows only one."""
    return 0 if torch.compiler.is_compiling() else threading.get_ident()


def _cache(args: tuple, kwargs: dict) -> Any:
    """The cache of self attention among the arguments of a forward, or None."""
    from transformers.cache_utils import Cache, EncoderDecoderCache

    for value in (*kwargs.values(), *args):
        if isinstance(value, EncoderDecoderCache):
            return value.self_attention_cache
        if isinstance(value, Cache):
            return value
    return None
