"""Exclusive self attention in models of other libraries: :func:`convert` and :func:`revert`."""

from xsa_core.adapters.base import LEFT_ALONE, SELF, UNSUPPORTED, Adapter, Coverage, Found, Settings
from xsa_core.adapters.exclusion import Exclusion
from xsa_core.adapters.registry import (
    ADAPTERS,
    LayerReport,
    convert,
    converted_layers,
    coverage,
    describe,
    revert,
    set_strength,
)

__all__ = [
    "ADAPTERS",
    "LEFT_ALONE",
    "SELF",
    "UNSUPPORTED",
    "Adapter",
    "Coverage",
    "Exclusion",
    "Found",
    "LayerReport",
    "Settings",
    "convert",
    "converted_layers",
    "coverage",
    "describe",
    "revert",
    "set_strength",
]
