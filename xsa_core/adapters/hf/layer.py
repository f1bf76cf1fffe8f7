"""A converted attention module of transformers: its own forward, with the own values caught on the way.

The attention function of transformers gets keys and values *after* the cache has taken them: a static cache
hands over its whole buffer, a sliding one what is left of the past, a beam's cache reordered rows. The values
of the new tokens themselves pass through exactly one place, the `update` of the cache, so that is where they
are taken.
"""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from xsa_core.adapters.hf.classes import foreign_arguments
from xsa_core.adapters.layer import ConvertedLayer

WANTED = "_xsa_own_values"  # on a cache, while a converted layer runs with it


@dataclass
class OwnValues:
    """What one forward of a converted module knows of the values of its tokens.

    Attributes:
        values: `B Hkv T D`, given to the cache; None without a cache. Where a model caches something else,
            from which it computes values afterwards, that.
        appended: the cache gave back what it held with this at the end.
        cross: keys come from other tokens.
    """

    values: Tensor | None = None
    appended: bool = False
    cross: bool = False


def recording(update: Any, static: type) -> Any:
    """The `update` of transformers' caches, leaving the new values where a running layer asked for them.

    Args:
        update: the method. static: class of the cache layers that give back a whole buffer.
    """

    @functools.wraps(update)
    def recorded(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        result = update(self, key_states, value_states, layer_idx, *args, **kwargs)
        own = getattr(self, WANTED, None)
        if own is not None:
            own.values = value_states
            own.appended = not isinstance(self.layers[layer_idx], static)
        return result

    return recorded


class InterfaceLayer(ConvertedLayer):
    """A module that calls the attention function of transformers; the rest of its forward is its own."""

    calls: dict[int, OwnValues]  # by thread, so that one model can serve several

    def exclusive_forward(self, *args: Any, **kwargs: Any) -> Any:
        """The library's forward; its attention function finds the own values in `calls`."""
        plain = super(ConvertedLayer, self).forward  # type: ignore[misc]
        own = OwnValues(cross=self._is_cross(args, kwargs))
        cache = None if own.cross else _cache(args, kwargs)
        here = thread()
        self.calls[here] = own
        if cache is not None:
            setattr(cache, WANTED, own)
        try:
            return plain(*args, **kwargs)
        finally:
            if cache is not None:
                setattr(cache, WANTED, None)
            del self.calls[here]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Unpickled in another process, the names in the configs must be known there."""
        from xsa_core.adapters.hf.install import install

        install()
        super().__setstate__(state)  # type: ignore[misc]

    def _is_cross(self, args: tuple, kwargs: dict) -> bool:
        for place, name in foreign_arguments(type(self).original):
            given = kwargs.get(name) if name in kwargs else (args[place] if place < len(args) else None)
            if given is not None:
                return True
        return False


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
