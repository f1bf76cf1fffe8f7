"""The directory of built kernels: a lock that is never stale, and the removal of what killed builds left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO


@contextlib.contextmanager
def lock(path: Path, timeout_s: float, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Exclusive between processes. The system releases it when its holder dies; the file goes at the end.
    `on_wait` is called once if another process holds it.

    Raises:
        TimeoutError: if another process holds it for longer than `timeout_s`.
        OSError: if the file cannot be made.
    """
    deadline = time.monotonic() + timeout_s
    while (handle := _taken(path)) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"another process has been building for {timeout_s:.0f} s")
        if on_wait is not None:
            on_wait()
            on_wait = None
        time.sleep(0.2)
    with handle:
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _taken(path: Path) -> IO[str] | None:
    """The locked file, or None while another process holds it."""
    handle = path.open("a")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        return None
    except OSError:  # a file system without locks: two builds at once are wasteful, not wrong
        return handle
    # The holder before may have removed the file between the opening and the lock.
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(path.stat(), os.fstat(handle.fileno())):
            return handle
    handle.close()
    return None


def tidy(folder: Path, older_than_s: float) -> None:
    """Remove temporary files and locks of builds that were killed. What cannot be removed stays."""
    now = time.time()
    for path in (*folder.glob("*.tmp"), *folder.glob("*.lock")):
        with contextlib.suppress(OSError):
            if now - path.stat().st_mtime < older_than_s:
                continue
            if path.suffix == ".tmp":
                path.unlink()
            elif (handle := _taken(path)) is not None:
                with handle:
                    path.unlink()
