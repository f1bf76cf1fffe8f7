"""Files and directories of a checkpoint on the disk: removed, synced, measured."""

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

CHUNK = 1 << 22  # bytes hashed at a time


def facts_of(path: Path) -> dict[str, Any]:
    """Return size and sha256 of a file."""
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def remove(path: Path) -> None:
    """Remove a file or a directory, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Bring a directory's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """Return the sha256 of a file, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while chunk := handle.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
