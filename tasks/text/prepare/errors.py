"""What goes wrong on a disk or in a worker, in one line for the user."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tasks.errors import UserError
from tasks.text.prepare.pool import WorkerError


@contextmanager
def disk(directory: Path) -> Iterator[None]:
    """Turn what the system says of a directory into one line for the user."""
    try:
        yield
    except OSError as error:
        raise UserError(disk_message(error.errno, error.strerror or str(error), directory)) from error


def disk_message(number: int | None, reason: str, directory: Path) -> str:
    """Return the line about an error of the system; a full disk has its own."""
    if number in {errno.ENOSPC, errno.EDQUOT}:
        return f"{directory}: the disk is full; free some space and give the same command, which goes on"
    return f"{directory}: {reason}; check the directory and its permissions, then give the same command again"


@contextmanager
def worker_errors(directory: Path) -> Iterator[None]:
    """Turn an error of a worker into one line for the user; a fault of the program stays one."""
    try:
        yield
    except WorkerError as error:
        if error.kind == "user":
            raise UserError(str(error)) from None
        if error.kind == "corrupt":
            raise UserError(
                f"{error}; replace the file, leave it out, or count it with --skip-corrupt"
            ) from None
        if error.kind == "system":
            raise UserError(disk_message(error.number, str(error), directory)) from None
        if error.kind == "died":
            raise UserError(
                f"{error}; give the same command again, with fewer --workers if memory is short"
            ) from None
        raise RuntimeError(f"{error}\n{error.trace}".strip()) from error
