"""Corpora: training and validation tokens with a fingerprint.

Two sources, both of bytes, (N,) uint8, memory-mapped: the documentation of a fixed list of installed packages
(English that is there anyway), and any UTF-8 text file.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.errors import UserError
from tasks.text import assembly, dedup, extract
from tasks.text.cache import Built, Progress, load_or_build
from tasks.text.files import cache_root, check_utf8
from tasks.text.sources import PACKAGES, Package, installed_sources
from tasks.text.tokenizer import ByteTokenizer
from tasks.text.workers import read_documentation

READING = 0.85  # share of the build time: the rest is the search for duplicates
MIN_SPLIT_BYTES = 2  # an input and its target; the loader asks for whole windows
LINE_SEARCH_BYTES = 1 << 12  # how far a file's cut may move to lie at a line's end


@dataclass(frozen=True)
class Corpus:
    """Two disjoint token sequences, (N,) unsigned integers, memory-mapped, and what identifies them.

    They are arrays, or shards that behave like one (`shards.TokenShards`).
    """

    train: Any
    validation: Any
    fingerprint: str  # sha256: where it is equal, both splits hold the same tokens from the same sources
    manifest: dict[str, Any]
    vocab_size: int

    @property
    def note(self) -> str | None:
        """What a reader of a record should know about this corpus, in one line; None if nothing."""
        return "; ".join(self.manifest.get("notes", ())) or None


def build_embedded_corpus(
    cache_dir: Path | None = None,
    workers: int = 2,
    progress: Progress | None = None,
    *,
    packages: Sequence[Package] = PACKAGES,
    foreign: bool | None = None,
) -> Corpus:
    """Return the corpus of installed documentation: built once, then read from the cache.

    `cache_dir` defaults to the user's cache directory (`files.cache_root`). `progress(message, fraction)` is
    called from this thread. Two processes that ask at once build it once, and a damaged copy is built again.
    The bytes depend on the versions of the packages and of Python alone, not on the number of workers or the
    order in which they finish. The tokens are bytes, (N,) uint8.

    Raises UserError for a missing package or another version than the lock's (`sources.installed_sources`
    says what `foreign` changes) and for a cache that cannot be written.
    """
    sources, notes = installed_sources(packages, foreign)
    listed = [[s.package.name, s.version, s.package.split, *s.package.directories] for s in sources]

    def build() -> Built:
        report = progress or (lambda message, fraction: None)
        files = [source.files() for source in sources]
        answers = read_documentation(
            [file for own in files for file in own],
            workers,
            lambda fraction: report("reading installed documentation", READING * fraction),
        )
        report("removing duplicates", READING)
        rest = iter(answers)
        readings = [
            assembly.Reading(source, own, [next(rest) for _ in own])
            for source, own in zip(sources, files, strict=True)
        ]
        texts, description = assembly.assemble(readings)
        report("corpus built", 1.0)
        return texts, description

    key = fingerprint(listed, _recipe())[:16]
    directory = (cache_dir or cache_root()) / "text" / f"embedded-{key}"
    splits, manifest = load_or_build(directory, build, progress)
    return _identified(splits, manifest | {"notes": notes}, listed)


def _recipe() -> list[str]:
    """Return what decides the bytes beside the sources: a copy that older code made must not be found."""
    return [hashlib.sha256(Path(m.__file__).read_bytes()).hexdigest() for m in (extract, dedup, assembly)]


def file_corpus(path: str | Path, validation_fraction: float = 0.1) -> Corpus:
    """Return the bytes of a UTF-8 file, (N,) uint8, mapped, its last `validation_fraction` held out.

    The cut lies after the first line end past the wanted place, or else between two characters. Raises
    UserError, in one line, for a path that is no file, an empty file, one with too few bytes for two splits,
    text that is not UTF-8 (with the byte offset) and a fraction outside (0, 1).
    """
    path = Path(path).expanduser()
    if not 0.0 < validation_fraction < 1.0:
        raise UserError(f"validation_fraction is {validation_fraction}, expected more than 0 and less than 1")
    if not path.is_file():
        what = "a directory" if path.is_dir() else "no such file"
        raise UserError(f"{path}: {what}, expected a UTF-8 text file; give the path of one")
    try:
        size = path.stat().st_size
        check_utf8(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None
    if size == 0:
        raise UserError(f"{path}: the file is empty, expected UTF-8 text; give another file")
    tokens = np.memmap(path, dtype=np.uint8, mode="r")
    cut = _cut(tokens, size - round(size * validation_fraction))
    if min(cut, size - cut) < MIN_SPLIT_BYTES:
        raise UserError(
            f"{path}: {size} bytes are too few: {cut} for training and {size - cut} for validation, "
            f"expected at least {MIN_SPLIT_BYTES} each; give a longer file or another validation_fraction"
        )
    splits = {"train": tokens[:cut], "validation": tokens[cut:]}
    rows = {
        name: {"bytes": len(part), "sha256": hashlib.sha256(part).hexdigest()}
        for name, part in splits.items()
    }
    return _identified(splits, {"file": path.name, "splits": rows}, "file")


def _cut(tokens: NDArray[np.uint8], wanted: int) -> int:
    """Return the place from `wanted` on where a line has just ended, or else a character begins."""
    search = max(wanted - 1, 0)  # the byte before the wanted place may be a line's end
    line_ends = np.flatnonzero(tokens[search : search + LINE_SEARCH_BYTES] == ord("\n"))
    if len(line_ends) and search + int(line_ends[0]) + 1 <= len(tokens) - MIN_SPLIT_BYTES:
        return search + int(line_ends[0]) + 1
    while wanted < len(tokens) and tokens[wanted] & 0b1100_0000 == 0b1000_0000:  # inside a character
        wanted += 1
    return wanted


def _identified(splits: dict[str, NDArray[np.uint8]], manifest: dict[str, Any], source: Any) -> Corpus:
    """Return a corpus of bytes whose fingerprint covers both splits' content and what they were made from."""
    identity = fingerprint(source, {name: row["sha256"] for name, row in manifest["splits"].items()})
    manifest = {"fingerprint": identity, **manifest}
    return Corpus(splits["train"], splits["validation"], identity, manifest, ByteTokenizer.vocab_size)


def fingerprint(*parts: Any) -> str:
    """Return the sha256 (hexadecimal) of plain values; the order of a dictionary's keys does not matter."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode("utf-8")).hexdigest()
