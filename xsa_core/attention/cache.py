"""Key-value cache for decoding: one growing pair of tensors per layer.

Axes: B batch, S cached positions, H value heads, D channels of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor


class LayerCache:
    """Keys and values one layer has seen, in a buffer that is allocated once.

    The buffer takes dtype, device and sizes from the first append, so the same class serves autocast,
    float64 tests and any head layout.

    Args:
        capacity: most positions the cache will hold.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store new positions and return everything stored so far.

        Args:
            k, v: `B T H D` of the new positions.

        Returns:
            Views `B S H D` of the buffers, S counting the new positions.

        Raises:
            ValueError: the new positions do not fit, the batch changed since the first append, or a gradient
                is asked for: the buffers are written in place, so none could reach earlier positions.
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
        if self._keys is None or self._values is None:
            self._keys = k.new_empty((k.shape[0], self.capacity, *k.shape[2:]))
            self._values = v.new_empty((v.shape[0], self.capacity, *v.shape[2:]))
        if self._keys.shape[0] != k.shape[0]:
            raise ValueError(f"the key-value cache holds {self._keys.shape[0]} rows, got {k.shape[0]}")
        self._keys[:, self.length : end] = k
        self._values[:, self.length : end] = v
        self.length = end
        return self._keys[:, :end], self._values[:, :end]

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


def default_positions(length: int, offset: int, device: torch.device) -> Tensor:
    """Positions `offset .. offset + length - 1`, int64 `T`."""
    return torch.arange(offset, offset + length, device=device)
