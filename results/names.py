"""What the files of a report are called."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

from results.record import BenchRecord


def slug(text: str) -> str:
    """Return a file name for a label: letters, digits, dots and dashes, never empty, cut where too long."""
    name = re.sub(r"[^A-Za-z0-9.=]+", "-", text).strip("-.") or "unnamed"
    if len(name) > 80:
        name = f"{name[:71]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return name


def unique_slugs(names: Mapping[str, str]) -> dict[str, str]:
    """Return a slug per key, with a piece of the key's hash where two labels give the same file name."""
    slugs = {key: slug(label) for key, label in names.items()}
    lowered = [name.lower() for name in slugs.values()]
    return {
        key: name
        if lowered.count(name.lower()) == 1
        else f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"
        for key, name in slugs.items()
    }


def effects_stem(task: str, name: str) -> str:
    """Return the stem of the effects of a metric in a task."""
    return slug(f"effects-{task}-{name.removeprefix('validation_')}")


def bench_stem(bench: BenchRecord) -> str:
    """Return the stem of a benchmark's figure, below the report's folder."""
    return f"figures/{slug(bench.run_id)}"
