"""Conversion of one module by exchanging its class: parameters, children and names stay where they are.

A converted layer is an instance of a subclass of its own class, made from that class and a
:class:`ConvertedLayer` that knows how its forward goes. The subclass is built on demand and cached, and is
pickled as the two classes it is made of, so that deepcopy and pickle need no more than imports.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from xsa_core.adapters.base import LEFT_ALONE, SELF, UNSUPPORTED, Coverage, Found, Settings
from xsa_core.adapters.exclusion import CHILD, Exclusion
from xsa_core.attention.masks import Mask


class ConvertedLayer:
    """Base of the layers of the adapters; comes before the library's class in the order of resolution.

    Subclasses give `exclusive_forward`, with the signature of the library's forward, and `sizes`.
    """

    original: ClassVar[type[nn.Module]]
    layer: ClassVar[type[ConvertedLayer]]
    exclusion: Exclusion

    @staticmethod
    def sizes(module: Any) -> tuple[int, int]:
        """(query heads, channels of a value head)."""
        raise NotImplementedError

    @staticmethod
    def exception(module: Any) -> tuple[str, str] | None:
        """(kind, reason) where this instance of the class is not to be converted."""
        return None

    @staticmethod
    def refuse(settings: Settings) -> str | None:
        """Why the class cannot do what is asked, None where it can."""
        return None

    def exclusive_forward(self, *args: Any, **kwargs: Any) -> Any:
        """The library's forward with exclusion."""
        raise NotImplementedError

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The library's own forward at strength 0, so that nothing at all differs there."""
        if self.exclusion.idle:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        return self.exclusive_forward(*args, **kwargs)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        own_v: Tensor | None = None,
        bias: Tensor | None = None,
        causal: bool = False,
        mask: Mask | None = None,
        scale: float | None = None,
        dropout_p: float = 0.0,
    ) -> Tensor:
        """Attention with exclusion in the layout of most libraries.

        Args:
            q: `B H T D`. k, v: `B Hkv S D`. own_v: `B Hkv T D`, where S differs from T.
            bias: added to the logits, or bool with True for what may be attended; broadcasts to `B H T S`.
            causal, mask, scale, dropout_p: as `exclusive_attention` takes them; dropout is for training.

        Returns:
            `B T H*D`, as an output projection wants it.
        """
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        call = self.exclusion.call(
            causal=causal,
            mask=mask,
            bias=additive(bias, q.dtype),
            scale=scale,
            dropout_p=dropout_p if self.training else 0.0,  # type: ignore[attr-defined]
        )
        return self.exclusion(q, k, v, v if own_v is None else own_v.transpose(1, 2), call).flatten(2)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _, _, *state = super().__reduce_ex__(protocol)
        return _empty, (type(self).original, type(self).layer), *state


def additive(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask or bias as what is added to the logits; True of a bool mask is what may be attended."""
    return bias if bias is None or bias.is_floating_point() else hidden(~bias.bool(), dtype)


def hidden(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The masks of `torch.nn` as what is added to the logits; True of a bool mask is what is hidden."""
    if mask.is_floating_point():
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask.bool(), -torch.inf)


@functools.cache
def converted_class(original: type[nn.Module], layer: type[ConvertedLayer]) -> type[nn.Module]:
    """The class of a converted module of class `original`."""
    body = {
        "__module__": original.__module__,
        "__doc__": original.__doc__,
        "original": original,
        "layer": layer,
    }
    return type(f"Exclusive{original.__name__}", (layer, original), body)


def _empty(original: type[nn.Module], layer: type[ConvertedLayer]) -> nn.Module:
    cls = converted_class(original, layer)
    return cls.__new__(cls)


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module before conversion."""
    return getattr(type(module), "original", type(module)) if CHILD in module._modules else type(module)


def build_exclusion(module: nn.Module, heads: int, head_dim: int, settings: Settings) -> Exclusion:
    """An :class:`Exclusion` on the device, in the dtype and in the mode of the module.

    Raises:
        ValueError: as :class:`Exclusion`.
    """
    exclusion = Exclusion(heads, head_dim, settings.variant, settings.strength, settings.backend)
    like = next(module.parameters(), None)
    if like is not None and like.is_floating_point():
        exclusion.to(device=like.device, dtype=like.dtype)
    return exclusion.train(module.training)


class TableAdapter:
    """An adapter that is two tables: classes it converts, and classes it knows and leaves alone.

    Args:
        name: of the library, as people import it.
        layers: qualified class name -> (its :class:`ConvertedLayer`, model the tests convert it in).
        others: qualified class name -> (kind, reason); an empty reason is that of the kind.
    """

    def __init__(
        self,
        name: str,
        layers: Mapping[str, tuple[type[ConvertedLayer], str]],
        others: Mapping[str, tuple[str, str]],
    ) -> None:
        self.name, self.layers, self.others = name, dict(layers), dict(others)

    def find(self, model: nn.Module) -> list[Found]:
        """See :class:`xsa_core.adapters.base.Adapter`. What lies inside a found module belongs to it."""
        return list(self._walk(model))

    def check(self, model: nn.Module, found: Sequence[Found], settings: Settings) -> None:
        """See :class:`xsa_core.adapters.base.Adapter`."""
        for row in found:
            layer = self._layer(row)
            if reason := layer.refuse(settings):
                raise ValueError(f"{row.path or 'the model'} ({row.cls}): {reason}; leave the layer out")
            build_exclusion(row.module, *layer.sizes(row.module), settings)

    def attach(self, model: nn.Module, found: Sequence[Found], settings: Settings) -> None:
        """See :class:`xsa_core.adapters.base.Adapter`."""
        for row in found:
            layer, module = self._layer(row), row.module
            exclusion = build_exclusion(module, *layer.sizes(module), settings)
            self.prepare(exclusion)
            module.add_module(CHILD, exclusion)
            module.__class__ = converted_class(type(module), layer)

    def detach(self, model: nn.Module, found: Sequence[Found]) -> None:
        """See :class:`xsa_core.adapters.base.Adapter`."""
        for row in found:
            original = plain_class(row.module)
            del row.module._modules[CHILD]
            row.module.__class__ = original

    def prepare(self, exclusion: Exclusion) -> None:
        """Called with the new child of each layer."""

    def coverage(self) -> list[Coverage]:
        """See :class:`xsa_core.adapters.base.Adapter`."""
        rows = [
            Coverage(self.name, self._short(name), "class exchanged", tested)
            for name, (_, tested) in self.layers.items()
        ]
        return rows + [
            Coverage(self.name, self._short(name), f"not covered: {kind}: {reason or LEFT_ALONE[kind]}")
            for name, (kind, reason) in self.others.items()
        ]

    def role(self, model: nn.Module, path: str, module: nn.Module) -> tuple[str, str] | None:
        """(kind, reason) of a module that its place in the model tells, not its class."""
        return None

    def _walk(self, model: nn.Module) -> Iterator[Found]:
        inside: list[str] = []
        for path, module in model.named_modules():
            if any(path.startswith(f"{outer}.") or outer == "" for outer in inside):
                continue
            known = self._known(module)
            if known is None:
                continue
            kind, reason = known
            if kind == SELF:
                kind, reason = self.role(model, path, module) or known
            inside.append(path)
            yield Found(path, module, kind, self.name, plain_class(module).__name__, reason)

    def _known(self, module: nn.Module) -> tuple[str, str] | None:
        cls = plain_class(module)
        for base in cls.__mro__:
            name = qualified(base)
            if name in self.others:
                kind, reason = self.others[name]
                return kind, reason or LEFT_ALONE[kind]
            if name in self.layers:
                if cls.forward is not base.forward:  # type: ignore[attr-defined]
                    return UNSUPPORTED, f"it is a {base.__name__} with a forward of its own"
                exception = self.layers[name][0].exception(module)
                if exception is None:
                    return SELF, ""
                kind, reason = exception
                return kind, reason or LEFT_ALONE[kind]
        return None

    def _layer(self, found: Found) -> type[ConvertedLayer]:
        names = map(qualified, plain_class(found.module).__mro__)
        return next(self.layers[name][0] for name in names if name in self.layers)

    def _short(self, name: str) -> str:
        return name.removeprefix(f"{self.name}.")


def qualified(cls: type) -> str:
    """Module and name of a class."""
    return f"{cls.__module__}.{cls.__qualname__}"
