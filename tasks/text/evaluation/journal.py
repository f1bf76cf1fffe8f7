"""Scores of an evaluation kept as they come, so that one that was stopped goes on where it was.

A file of JSON lines, one per batch: a hash of what was computed, its result, the seconds it took. The hash
covers the tokens themselves, so it says of which documents a result is; of which model and code is for the
file's name to say. A line that a kill cut short does not count. The record is what stays of an evaluation;
with it, the journal goes.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tasks.errors import UserError


class Journal:
    """Results by key, on disk before anything else is computed.

    Args:
        path: the file; None keeps nothing. It is one process's alone, which is for the caller to see to.

    Attributes:
        used: how many kept results were taken.
        seconds: what those had taken to compute.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.used = 0
        self.seconds = 0.0
        self._kept: dict[str, tuple[Any, float]] = {}
        self._clock = time.perf_counter()
        if path is not None and path.exists():
            self._read(path)

    @property
    def kept(self) -> int:
        """How many results wait to be taken."""
        return len(self._kept)

    def recall(self, key: Callable[[], str], compute: Callable[[], Any]) -> Any:
        """Return the result kept under a key, else compute it, keep it and return it.

        Args:
            key: asked only where results are kept, since it hashes much.
            compute: returns what JSON can hold: lists, strings, numbers, truth values.

        Raises:
            UserError: the file cannot be written.
        """
        if self.path is None:
            return compute()
        name = key()
        if name in self._kept:
            value, seconds = self._kept.pop(name)
            self.used += 1
            self.seconds += seconds
            self._clock = time.perf_counter()
            return value
        value = compute()
        self._append({"key": name, "value": value, "seconds": time.perf_counter() - self._clock})
        self._clock = time.perf_counter()
        return value

    def remove(self) -> None:
        """Forget everything: the evaluation is over."""
        self._kept.clear()
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _read(self, path: Path) -> None:
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):  # cut short: what is appended next begins a line
            os.truncate(path, whole)
        for line in content[:whole].splitlines():
            try:
                found = json.loads(line)
                self._kept[found["key"]] = found["value"], float(found["seconds"])
            except (ValueError, KeyError, TypeError):
                continue  # damaged: it is computed anew

    def _append(self, line: dict[str, Any]) -> None:
        assert self.path is not None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as stream:
                stream.write(json.dumps(line).encode() + b"\n")
        except OSError as error:
            raise UserError(
                f"{self.path}: the scores so far cannot be kept ({error.strerror or error}); make room, then "
                "give the same command: it goes on from there"
            ) from error


def source_digest(*folders: Path) -> str:
    """Return a hash of all Python and C++ sources below some folders: results of other code are not kept."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".cpp", ".h")):
            digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()
