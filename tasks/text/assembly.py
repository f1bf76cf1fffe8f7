"""From the docstrings of many files to the two texts of a corpus: order, duplicates, counts.

Validation packages come first when duplicates are judged. What both splits hold then stays in validation and
leaves training, so that validation is a text as it was written.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tasks.text.cache import SPLITS
from tasks.text.dedup import leakage, near_duplicates
from tasks.text.extract import MIN_CHARACTERS, Docstring, without_empty_sections
from tasks.text.sources import Source
from tasks.text.workers import Answer

SEPARATOR = "\n\n\n"  # after every docstring; within one, an empty line at most parts two paragraphs
MIN_KEPT = 0.4  # of a docstring's characters: what duplicates leave of a shorter one is a stump


@dataclass(frozen=True)
class Reading:
    """One package as it was read: its files in their fixed order, and what each held."""

    source: Source
    files: list[Path]
    answers: list[Answer]


@dataclass
class _Part:
    """One package's docstrings on their way into the corpus."""

    reading: Reading
    docstrings: list[Docstring]
    text: str = ""
    kept: int = 0

    @property
    def split(self) -> str:
        return self.reading.source.package.split


def assemble(readings: Sequence[Reading]) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Return the UTF-8 text of each split and the description of how it came about.

    Both are pure functions of the argument. The description counts, for every package, files, docstrings and
    bytes, names the files that could not be read, and says what was removed and what of the validation text
    stands in training. Raises ValueError where no validation text is left.
    """
    parts = [
        _Part(reading, [text for answer in reading.answers if not isinstance(answer, str) for text in answer])
        for reading in readings
    ]
    judged = sorted(parts, key=lambda part: part.split != "validation")  # stable: validation comes first
    exact = _drop_repeated_docstrings(judged)
    near = _drop_near_duplicates(judged)
    texts = {split: "".join(part.text for part in parts if part.split == split) for split in SPLITS}
    description = {
        "packages": [_describe(part) for part in parts],
        "removed": {"exact_docstrings": exact, "near_duplicate_paragraphs": near},
        "leakage": asdict(leakage(texts["train"], texts["validation"])),
    }
    return {split: text.encode("utf-8") for split, text in texts.items()}, description


def _drop_repeated_docstrings(parts: Sequence[_Part]) -> int:
    """Drop docstrings that stand in full before, up to white space; return how many."""
    seen: set[str] = set()
    dropped = 0
    for part in parts:
        fresh = []
        for docstring in part.docstrings:
            words = " ".join(" ".join(docstring).split())
            if words in seen:
                dropped += 1
            else:
                seen.add(words)
                fresh.append(docstring)
        part.docstrings = fresh
    return dropped


def _drop_near_duplicates(parts: Sequence[_Part]) -> int:
    """Set each part's text to what is new in it; return how many paragraphs repeated earlier ones."""
    docstrings = (docstring for part in parts for docstring in part.docstrings)
    repeated = near_duplicates([paragraph for docstring in docstrings for paragraph in docstring])
    flags = iter(repeated.tolist())
    for part in parts:
        kept = []
        for docstring in part.docstrings:
            fresh = without_empty_sections([paragraph for paragraph in docstring if not next(flags)])
            size = sum(map(len, fresh))
            if size >= MIN_CHARACTERS and size >= MIN_KEPT * sum(map(len, docstring)):
                kept.append("\n\n".join(fresh) + SEPARATOR)
        part.text, part.kept = "".join(kept), len(kept)
    return int(repeated.sum())


def _describe(part: _Part) -> dict[str, Any]:
    source, files = part.reading.source, part.reading.files
    answers = zip(files, part.reading.answers, strict=True)
    return {
        "name": source.package.name,
        "version": source.version,
        "split": part.split,
        "files": len(files),
        "docstrings": part.kept,
        "bytes": len(part.text.encode("utf-8")),
        "unreadable": [f"{file.name}: {answer}" for file, answer in answers if isinstance(answer, str)],
    }
