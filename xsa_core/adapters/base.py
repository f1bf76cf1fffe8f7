"""What an adapter is: the one description that the registry, the adapters and their tests share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import nn

SELF = "self"  # token self attention that can be converted
UNSUPPORTED = "unsupported"  # token self attention that cannot: converting the model is an error

# What is left as it is, by kind, and why.
LEFT_ALONE = {
    "cross": "queries and keys belong to different tokens: there is no own value",
    "pooling": "a few learned queries look at all tokens: they have no own value",
    "class": "only the class token asks: it gathers the others",
    "channel": "attention between channels, not between tokens",
    "linear": "no softmax over tokens: the output is no weighted mean of the values",
    "subsampled": "keys and values are pooled or strided: a token has no value of its own",
    "gate": "weights of channels or places, without queries and keys",
}


@dataclass(frozen=True)
class Settings:
    """What a converted layer is to do; see :func:`xsa_core.convert`."""

    variant: str = "xsa"
    strength: float = 1.0
    backend: str = "auto"


@dataclass(frozen=True)
class Found:
    """One attention module of a model.

    Attributes:
        path: as in ``model.named_modules()``.
        module: itself.
        kind: ``SELF``, ``UNSUPPORTED`` or a key of ``LEFT_ALONE``.
        adapter: name of the adapter that knows it.
        cls: name of its class before conversion.
        reason: why it is not converted; empty for ``SELF``.
    """

    path: str
    module: nn.Module
    kind: str
    adapter: str
    cls: str
    reason: str = ""


@dataclass(frozen=True)
class Coverage:
    """One row of the coverage table.

    Attributes:
        library: as people import it.
        cls: class, qualified below the library.
        how: what conversion does, or "not covered: " and the kind with the reason.
        tested: model the tests convert it in; empty where nothing is converted.
    """

    library: str
    cls: str
    how: str
    tested: str = ""


class Adapter(Protocol):
    """Knows the attention classes of one library.

    It must not import its library before a model of that library is at hand. Every module it converts gets a
    child named ``exclusion``, an :class:`xsa_core.adapters.exclusion.Exclusion`, through which all its self
    attention runs; the registry finds converted layers by it, and probes hook it.
    """

    name: str

    def find(self, model: nn.Module) -> list[Found]:
        """Every attention module of the model that the adapter knows, converted or not, in model order."""
        ...

    def attach(self, model: nn.Module, found: Sequence[Found], settings: Settings) -> None:
        """Convert these modules, all of kind ``SELF`` and plain. Everything was checked before; must not
        fail halfway.
        """
        ...

    def detach(self, model: nn.Module, found: Sequence[Found]) -> None:
        """Make these converted modules plain again."""
        ...

    def check(self, model: nn.Module, found: Sequence[Found], settings: Settings) -> None:
        """Refuse what ``attach`` cannot do, before anything is touched.

        Raises:
            ValueError: names the path and what to do.
        """
        ...

    def coverage(self) -> list[Coverage]:
        """Rows of the coverage table."""
        ...
