"""A job on its way: what it is, and the part files of its units.

DIR/.work/job.json          what is being prepared, with the plan
DIR/.work/journal.json      shards that are complete, and where in the parts the next one starts
DIR/.work/NNNNNNNN.train    tokens of one unit, little-endian uint16, no header
DIR/.work/NNNNNNNN.validation
DIR/.work/NNNNNNNN.json     its counts, written last: with it the unit is done
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.text.files import write_whole
from tasks.text.prepare.documents import EMPTY, NOT_UTF8, CorruptError, Document
from tasks.text.prepare.plan import Piece, PieceReader
from tasks.text.prepare.tokenizers import Tokenizer
from tasks.text.shards import TOKEN

SPLITS = ("train", "validation")
WORK = ".work"
EXAMPLES = 20  # skipped documents named in a unit's counts and in the manifest; the others are counted
HASH_BITS = 64


@dataclass
class Counts:
    """What a unit, or several, came to."""

    documents: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    text_bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    skipped: dict[str, int] = field(default_factory=dict)  # reason -> documents
    examples: list[str] = field(default_factory=list)  # "file, row 17: empty"
    corrupt: list[str] = field(default_factory=list)  # files or parts of them that could not be read

    def skip(self, name: str, place: str, reason: str) -> None:
        """Count a document that is left out."""
        self.skipped[reason] = self.skipped.get(reason, 0) + 1
        if len(self.examples) < EXAMPLES:
            self.examples.append(f"{name}, {place}: {reason}")

    def add(self, other: "Counts") -> None:
        """Add the counts of what follows."""
        for own, more in (
            (self.documents, other.documents),
            (self.tokens, other.tokens),
            (self.text_bytes, other.text_bytes),
            (self.skipped, other.skipped),
        ):
            for name, count in more.items():
                own[name] = own.get(name, 0) + count
        self.examples = (self.examples + other.examples)[:EXAMPLES]
        self.corrupt += other.corrupt


def held_out(text: bytes, fraction: float) -> bool:
    """Tell whether a document is for validation: by a hash of its text, so equal texts are on one side.

    Order, file, worker and the other documents do not matter.
    """
    number = int.from_bytes(hashlib.blake2b(text, digest_size=HASH_BITS // 8).digest(), "little")
    return number < fraction * 2**HASH_BITS


def part(directory: Path, unit: int, split: str) -> Path:
    """Return the path of a unit's tokens."""
    return directory / f"{unit:08d}.{split}"


def write_parts(
    directory: Path,
    unit: int,
    pieces: Iterable[Piece],
    reader: PieceReader,
    tokenizer: Tokenizer,
    fraction: float,
    skip_corrupt: bool,
) -> Counts:
    """Tokenize a unit and write its parts, each whole, the counts last; return the counts.

    Raises CorruptError with the file's name unless `skip_corrupt`, which counts it; OSError.
    """
    counts = Counts()
    tokens: dict[str, list[NDArray[np.uint16]]] = {split: [] for split in SPLITS}
    start = np.array([tokenizer.end_of_text], dtype=np.uint16)
    for piece in pieces:
        name = reader.source.files[piece.file].name
        taken = 0
        try:
            for document in reader.documents(piece):
                taken += 1
                ids = _encode(document, tokenizer, name, counts)
                if ids is not None:
                    split = SPLITS[held_out(document.text, fraction)]
                    tokens[split] += [start, ids]
                    counts.documents[split] += 1
                    counts.tokens[split] += 1 + len(ids)
                    counts.text_bytes[split] += len(document.text)
        except CorruptError as error:
            reader.close()
            unit_name = "row groups" if reader.source.files[piece.file].format == "parquet" else "bytes"
            where = f"{name}, {unit_name} {piece.start} to {piece.stop - 1}"
            if not skip_corrupt:
                raise CorruptError(f"{where}: {error}") from error
            counts.corrupt.append(f"{where}: nothing after {taken} documents could be read ({error})")
    for split in SPLITS:
        chunks = (np.ascontiguousarray(ids, dtype=TOKEN).data for ids in tokens[split] if len(ids))
        write_whole(part(directory, unit, split), [b"".join(chunks)])
    text = json.dumps(asdict(counts))
    write_whole(directory / f"{unit:08d}.json", [text.encode("utf-8")])
    return counts


def _encode(document: Document, tokenizer: Tokenizer, name: str, counts: Counts) -> NDArray[np.uint16] | None:
    """Return a document's tokens (N,), or None after counting why it has none."""
    if document.problem is not None:
        counts.skip(name, document.place, document.problem)
        return None
    try:
        text = document.text.decode("utf-8")
    except UnicodeDecodeError:
        counts.skip(name, document.place, NOT_UTF8)
        return None
    if not text.strip():
        counts.skip(name, document.place, EMPTY)
        return None
    return tokenizer.encode(text)


def read_counts(directory: Path, unit: int, needed: Iterable[str]) -> Counts | None:
    """Return the counts of a unit that is done, else None.

    The parts of the splits `needed` must be there in full too: a unit that is damaged counts as not done.
    """
    try:
        data: dict[str, Any] = json.loads((directory / f"{unit:08d}.json").read_bytes())
        counts = Counts(**data)
        for split in needed:
            if part(directory, unit, split).stat().st_size != counts.tokens[split] * TOKEN.itemsize:
                return None
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return counts
