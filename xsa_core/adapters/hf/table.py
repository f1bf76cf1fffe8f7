"""The coverage table of transformers, as :mod:`xsa_core.adapters.hf.walk` found it."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from xsa_core.adapters.base import SELF, UNSUPPORTED, Coverage

FILE = Path(__file__).with_name("coverage.json")
NAME = "transformers"


@functools.cache
def walk() -> dict[str, Any]:
    """What the walk wrote: `transformers`, its version, and `types`, an entry per model type."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def rows() -> list[Coverage]:
    """A row per attention class of transformers' models; `tested` names a model that was run with it."""
    found: dict[str, tuple[dict[str, str], str]] = {}
    ran: dict[str, str] = {}
    for entry in walk()["types"].values():
        for cls, what in entry.get("classes", {}).items():
            if what["adapter"] in (NAME, ""):
                found.setdefault(cls, (what, entry["model"]))
        for cls in entry.get("ran", ()):
            ran.setdefault(cls, entry["model"])
    return [
        Coverage(NAME, cls.removeprefix(f"{NAME}.models."), _how(what), ran.get(cls, ""))
        for cls, (what, _) in sorted(found.items())
    ]


def unbuilt() -> dict[str, str]:
    """Model type -> why the walk could not build it from its default config; convert() decides there."""
    return {name: entry["not_built"] for name, entry in walk()["types"].items() if "not_built" in entry}


def _how(what: dict[str, str]) -> str:
    if what["kind"] == SELF:
        return "AttentionInterface"
    kind = "" if what["kind"] == UNSUPPORTED else f"{what['kind']}: "
    return f"not covered: {kind}{what['reason']}"
