"""The coverage table of transformers; see the walk that writes it."""

from __future__ import annotations

from xsa_core.adapters.base import Coverage


def rows() -> list[Coverage]:
    """A row per attention class of the models that the walk builds."""
    return []
