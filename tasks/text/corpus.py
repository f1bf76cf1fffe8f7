"""What a corpus is: training and validation tokens with a fingerprint. Built by `embedded` and `textfile`."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray


@dataclass(frozen=True)
class Corpus:
    """Two disjoint token arrays, (N,) unsigned integers, usually memory-mapped, and what identifies them."""

    train: NDArray[Any]
    validation: NDArray[Any]
    fingerprint: str  # sha256: where it is equal, both splits hold the same tokens from the same sources
    manifest: dict[str, Any]
    vocab_size: int

    @property
    def note(self) -> str | None:
        """What a reader of a record should know about this corpus, in one line; None if nothing."""
        return "; ".join(self.manifest.get("notes", ())) or None


def fingerprint(*parts: Any) -> str:
    """Return the sha256 (hexadecimal) of plain values; the order of a dictionary's keys does not matter."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode("utf-8")).hexdigest()
