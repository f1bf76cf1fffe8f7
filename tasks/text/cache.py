"""Built token files in the user's cache: built once, checked at every use, rebuilt when damaged.

One directory per corpus, `<cache>/text/<name>-<key>/`, with one `.bin` of raw tokens per split and a
`manifest.json` that states their sizes and sha256. The manifest is written last, so a directory without a
fitting manifest is unfinished or damaged.
"""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.errors import UserError
from tasks.text.files import exclusive, sha256_of, write_whole

Progress = Callable[[str, float], None]  # what is being done, and the fraction of the whole that is done
Splits = dict[str, NDArray[np.uint8]]
Built = tuple[Mapping[str, bytes], dict[str, Any]]  # the bytes of every split, and a manifest without them

MANIFEST = "manifest.json"
SPLITS = ("train", "validation")


class DamagedError(Exception):
    """A cached corpus is not what its manifest says."""


def load(directory: Path) -> tuple[Splits, dict[str, Any]]:
    """Return the memory-mapped splits, (N,) uint8, and the manifest.

    Raises FileNotFoundError where nothing was built and DamagedError, with the reason, where a file is
    missing or cannot be read, has another size or other content. Checking reads every byte: about 0.05 s for
    20 MB.
    """
    try:
        text = (directory / MANIFEST).read_bytes()
        manifest = json.loads(text)
        rows = [manifest["splits"][name] for name in SPLITS]
        stated = [(int(row["bytes"]), str(row["sha256"])) for row in rows]
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, TypeError):
        raise DamagedError(f"{MANIFEST} cannot be read") from None
    return {
        name: _checked(directory / f"{name}.bin", *row) for name, row in zip(SPLITS, stated, strict=True)
    }, manifest


def _checked(path: Path, size: int, digest: str) -> NDArray[np.uint8]:
    try:
        found = path.stat().st_size
        if found != size:
            raise DamagedError(f"{path.name} has {found} bytes, expected {size}")
        if sha256_of(path) != digest:
            raise DamagedError(f"{path.name} has another sha256 than its manifest")
    except OSError as error:
        raise DamagedError(f"{path.name} cannot be read: {error.strerror}") from None
    return np.memmap(path, dtype=np.uint8, mode="r")


def store(directory: Path, built: Built) -> None:
    """Write the splits and then their manifest. Raises OSError."""
    texts, manifest = built
    directory.mkdir(parents=True, exist_ok=True)
    rows = {}
    for name in SPLITS:
        digest = write_whole(directory / f"{name}.bin", [texts[name]])
        rows[name] = {"bytes": len(texts[name]), "sha256": digest}
    text = json.dumps(manifest | {"splits": rows}, indent=1, sort_keys=True) + "\n"
    write_whole(directory / MANIFEST, [text.encode("utf-8")])


def load_or_build(
    directory: Path, build: Callable[[], Built], progress: Progress | None = None
) -> tuple[Splits, dict[str, Any]]:
    """Return what `load` returns, after building it where it is absent or damaged.

    Only one process builds; others say so and wait. Messages go to `progress`, or to the standard error
    stream where there is none, so that nobody waits without being told why. Raises UserError when the cache
    cannot be written.
    """
    say = progress or (lambda message, fraction: print(message, file=sys.stderr, flush=True))
    try:
        return load(directory)
    except (FileNotFoundError, DamagedError):
        pass  # looked at again, under the lock
    lock = directory.with_name(f"{directory.name}.lock")
    with exclusive(lock, lambda: say("waiting for another process building the corpus", 0.0)):
        try:
            return load(directory)
        except FileNotFoundError:
            pass
        except DamagedError as damage:
            say(f"the cached corpus in {directory} is damaged ({damage}); building it again", 0.0)
        _remove_leftovers(directory)
        built = build()
        try:
            store(directory, built)
        except OSError as error:
            raise UserError(
                f"cannot write the corpus to {directory} ({error.strerror or error}); "
                "free some space or set XSA_CACHE to another directory"
            ) from None
        return load(directory)


def _remove_leftovers(directory: Path) -> None:
    """Remove temporary files of a builder that was killed: under the lock nobody else is writing."""
    for path in directory.glob(".*.tmp"):
        path.unlink(missing_ok=True)
