"""Files: written whole with their sha256, locked, checked."""

import codecs
import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from tasks.errors import UserError
from xsa_core.files import cache_root, whole

__all__ = ["cache_root", "check_utf8", "exclusive", "sha256_of", "write_whole"]

Buffer = bytes | memoryview

CHUNK_BYTES = 1 << 20


def write_whole(path: Path, chunks: Iterable[Buffer]) -> str:
    """Write `chunks` to `path` so that a reader sees the old file or all of the new one; return its sha256.

    Raises OSError; after a failure the old file is as it was.
    """
    digest = hashlib.sha256()
    with whole(path) as temporary, temporary.open("xb") as stream:
        for chunk in chunks:
            digest.update(chunk)
            stream.write(chunk)
    return digest.hexdigest()


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file's bytes. Raises OSError."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def check_utf8(path: Path) -> None:
    """Raise UserError with the byte offset of the first place that is not UTF-8; memory is bounded."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset = 0  # of the chunk in the file
    with path.open("rb") as stream:
        while True:
            chunk = stream.read(CHUNK_BYTES)
            pending = len(decoder.getstate()[0])  # bytes of a character that the last chunk's end cut
            try:
                decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                place = offset - pending + error.start
                raise UserError(
                    f"{path}: not UTF-8 at byte {place} ({error.reason}); convert it, for example with iconv"
                ) from None
            offset += len(chunk)
            if not chunk:
                return


@contextmanager
def exclusive(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock file `path`; `waiting` is called once if another process holds it.

    The lock belongs to the process: the system frees it when its holder dies. Raises UserError when the
    directory cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            waiting()
            lock.acquire()
    except OSError as error:
        raise UserError(
            f"cannot write to the cache {path.parent} ({error.strerror or error}); "
            "set XSA_CACHE to a directory that can be written"
        ) from None
    try:
        yield
    finally:
        lock.release()
