"""Key-value cache for decoding: one growing pair of tensors per layer.

Axes: B batch, S cached positions, H value heads, D channels of a head.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor


class LayerCache:
    """Keys and values one layer has seen, in a buffer that is allocated once.

    The buffer takes dtype, device and sizes from the first append to an empty cache, so the same class
    serves autocast, float64 tests and any head layout.

    Args:
        capacity: most positions the cache will hold.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def __len__(self) -> int:
        return self.length

    def __bool__(self) -> bool:  # an empty cache is still a cache
        return True

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store new positions and return everything stored so far.

        Args:
            k, v: `B T H D` of the new positions.

        Returns:
            Views `B S H D` of the buffers, S counting the new positions.

        Raises:
            ValueError: the new positions do not fit, have another batch, dtype or head layout than the stored
                ones, or ask for a gradient: the buffers are written in place, so none could reach earlier
                positions. The cache is then as it was.
        """
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise ValueError(
                "the key-value cache keeps no gradients: decode under torch.no_grad(), or train without it"
            )
        end = self.length + k.shape[1]
        if end > self.capacity:
            raise ValueError(
                f"the key-value cache holds {self.capacity} positions, {end} are needed: make it larger"
            )
        keys, values = self._keys, self._values
        if keys is None or values is None or (self.length == 0 and not (_like(keys, k) and _like(values, v))):
            keys = self._keys = k.new_empty((k.shape[0], self.capacity, *k.shape[2:]))
            values = self._values = v.new_empty((v.shape[0], self.capacity, *v.shape[2:]))
        self._check(keys, k)
        self._check(values, v)
        keys[:, self.length : end] = k
        values[:, self.length : end] = v
        self.length = end
        return keys[:, :end], values[:, :end]

    def _check(self, stored: Tensor, new: Tensor) -> None:
        if stored.shape[0] != new.shape[0]:
            raise ValueError(f"the key-value cache holds {stored.shape[0]} rows, got {new.shape[0]}")
        if stored.shape[2:] != new.shape[2:] or stored.device != new.device:
            raise ValueError(
                f"the key-value cache holds heads {tuple(stored.shape[2:])} on {stored.device}, got "
                f"{tuple(new.shape[2:])} on {new.device}; a cache belongs to one layer"
            )
        if stored.dtype != new.dtype:
            raise ValueError(
                f"the key-value cache holds {stored.dtype}, the new tokens are {new.dtype}; decode all of a "
                "sequence in one dtype, with autocast always or never"
            )
        if stored.is_inference() and not torch.is_inference_mode_enabled():
            raise ValueError(
                "the key-value cache was filled under torch.inference_mode(): go on under it, or decode all "
                "of the sequence under torch.no_grad()"
            )

    def truncate(self, length: int) -> None:
        """Forget all positions from `length` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot cut a cache of {self.length} positions to {length}")
        self.length = length

    def reorder(self, rows: Tensor) -> None:
        """Keep and arrange the given batch rows (beam search, finished samples). `rows`: B' int64."""
        if self._keys is not None and self._values is not None:
            self._keys = self._keys.index_select(0, rows)
            self._values = self._values.index_select(0, rows)


def _like(stored: Tensor, new: Tensor) -> bool:
    """Whether new positions fit the buffer as it is."""
    same = stored.dtype == new.dtype and stored.device == new.device and not stored.is_inference()
    return same and stored.shape[0] == new.shape[0] and stored.shape[2:] == new.shape[2:]


class KVCache:
    """The caches of all layers of a model; `len()` is the number of positions seen.

    Args:
        n_layers: layers of the model.
        capacity: most positions, at most the model's `max_seq_len`.
    """

    def __init__(self, n_layers: int, capacity: int) -> None:
        if n_layers < 1 or capacity < 1:
            raise ValueError(
                f"a cache needs at least one layer and one position, got {n_layers} and {capacity}"
            )
        self.layers = [LayerCache(capacity) for _ in range(n_layers)]

    @property
    def capacity(self) -> int:
        """Most positions the cache will hold."""
        return self.layers[0].capacity

    def __len__(self) -> int:
        return self.layers[-1].length

    def __bool__(self) -> bool:  # an empty cache is still a cache
        return True

    def truncate(self, length: int) -> None:
        """Forget all positions from `length` on, in every layer."""
        for layer in self.layers:
            layer.truncate(length)

    def reorder(self, rows: Tensor) -> None:
        """Keep and arrange batch rows in every layer. `rows`: B' int64."""
        for layer in self.layers:
            layer.reorder(rows)

    def memory_bytes(self) -> int:
        """Bytes of all buffers allocated so far."""
        buffers = [b for layer in self.layers for b in (layer._keys, layer._values) if b is not None]
        return sum(b.numel() * b.element_size() for b in buffers)


@contextlib.contextmanager
def unchanged_on_error(cache: LayerCache | KVCache) -> Iterator[None]:
    """A call that fails inside leaves the cache as it was, so that it can be made again."""
    before = len(cache)
    try:
        yield
    except BaseException:
        cache.truncate(before)
        raise


def check_positions(positions: Tensor, B: int, T: int) -> None:
    """Refuse positions that are not those of `B` sequences of `T` tokens.

    Raises:
        ValueError: another shape, or no integers.
    """
    good = isinstance(positions, Tensor) and tuple(positions.shape) in ((T,), (1, T), (B, T))
    if not good or positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
        got = (
            f"{positions.dtype} {tuple(positions.shape)}"
            if isinstance(positions, Tensor)
            else repr(positions)
        )
        raise ValueError(f"positions must be integers (T,) or (B, T) = {(B, T)}, got {got}")


def default_positions(length: int, offset: int, device: torch.device) -> Tensor:
    """Positions `offset .. offset + length - 1`, int64 `T`."""
    return torch.arange(offset, offset + length, device=device)
