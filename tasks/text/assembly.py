"""From the docstrings of many files to the two texts of a corpus: order, duplicates, counts.

Validation packages come first when duplicates are judged. What both splits hold then stays in validation and
leaves training, so that validation is a text as it was written.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tasks.text.dedup import leakage, near_duplicates
from tasks.text.extract import MIN_CHARACTERS, Docstring, without_empty_sections
from tasks.text.sources import Source
from tasks.text.workers import Answer

SPLITS = ("train", "validation")
SEPARATOR = "\n\n\n"  # after every docstring; within one, an empty line at most parts two paragraphs
MIN_KEPT = 0.4  # of a docstring's characters: what duplicates leave of a shorter one is a stump


@dataclass
class _Part:
    """One package's docstrings on their way into the corpus."""

    source: Source
    docstrings: list[Docstring]
    unreadable: list[str]
    text: str = ""
    kept: int = 0


def assemble(sources: Sequence[Source], answers: Sequence[Answer]) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Return the UTF-8 text of each split and the description of how it came about.

    `answers` holds the docstrings of all files of all sources, in order. Both results are pure functions of
    the arguments. The description counts, for every package, files, docstrings and bytes, names the files
    that could not be read, and says what was removed and what of the validation text stands in training.
    """
    parts = list(_parts(sources, answers))
    judged = sorted(parts, key=lambda part: part.source.package.split != "validation")  # stable
    exact = _drop_repeated_docstrings(judged)
    near = _drop_near_duplicates(judged)
    texts = {
        split: "".join(part.text for part in parts if part.source.package.split == split) for split in SPLITS
    }
    description = {
        "packages": [_describe(part) for part in parts],
        "removed": {"exact_docstrings": exact, "near_duplicate_paragraphs": near},
        "leakage": asdict(leakage(texts["train"], texts["validation"])),
    }
    return {split: text.encode("utf-8") for split, text in texts.items()}, description


def _parts(sources: Sequence[Source], answers: Sequence[Answer]) -> Iterator[_Part]:
    start = 0
    for source in sources:
        own = answers[start : start + len(source.files)]
        start += len(source.files)
        yield _Part(
            source,
            [docstring for answer in own if not isinstance(answer, str) for docstring in answer],
            [
                f"{file.name}: {answer}"
                for file, answer in zip(source.files, own, strict=True)
                if isinstance(answer, str)
            ],
        )


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
    return {
        "name": part.source.package.name,
        "version": part.source.version,
        "split": part.source.package.split,
        "files": len(part.source.files),
        "docstrings": part.kept,
        "bytes": len(part.text.encode("utf-8")),
        "unreadable": part.unreadable,
    }
