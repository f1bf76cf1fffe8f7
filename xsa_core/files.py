"""Files: written whole or not at all, and the user's cache directory. Standard library only."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield a temporary name in `path`'s directory; at the end of the block that file becomes `path`.

    A reader sees the old file or all of the new one: the bytes reach the disk before the rename, the rename
    before this returns. After any failure (disk full, interrupt) the old file is as it was and the temporary
    one is gone.

    Raises:
        OSError: from the file system, or because the block wrote no file.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        _sync(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cache_root() -> Path:
    """The suite's cache directory: `XSA_CACHE`, else `XDG_CACHE_HOME/xsa`, else `~/.cache/xsa`."""
    if own := os.environ.get("XSA_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "xsa"
    return Path.home() / ".cache" / "xsa"
