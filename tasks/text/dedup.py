"""Exact and near duplicates of text, and how much of a validation set stands in its training set.

Two docstrings of one package often share whole paragraphs (parameters described again for every function),
so a duplicate is judged paragraph by paragraph, by what it contains and not by what it equals: a paragraph
is a near duplicate when at least half of its six-word sequences (words lowercased, digits and punctuation
left out) stand in paragraphs before it. This is exact containment, computed over the whole corpus at once;
no sampling (MinHash) is needed at this size. Words are hashed to 32 bits and sequences to 64.
"""

import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SEQUENCE_WORDS = 6
MAX_REPEATED = 0.5
MIN_LINE_CHARACTERS = 20  # "Parameters", "Returns" and the like are no leak

_WORD = re.compile(r"[a-z]+")
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd: the step is a bijection of the 64-bit integers


def word_hashes(texts: Iterable[str]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Return the hashes of all words of all texts in order (W,), and each text's word count (N,)."""
    words: list[int] = []
    counts: list[int] = []
    for text in texts:
        found = _WORD.findall(text.lower())
        words.extend(map(zlib.crc32, map(str.encode, found)))
        counts.append(len(found))
    return np.array(words, dtype=np.uint64), np.array(counts, dtype=np.int64)


def _sequences(
    texts: Iterable[str], length: int
) -> tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.int64]]:
    """Return every word sequence's hash (S,) and the text it stands in (S,), and sequences per text (N,)."""
    words, counts = word_hashes(texts)
    total = max(len(words) - length + 1, 0)
    hashes = np.zeros(total, dtype=np.uint64)
    for k in range(length):
        hashes = (hashes ^ (hashes >> np.uint64(29))) * _MULTIPLIER + words[k : k + total]
    ends = np.cumsum(counts)
    text_of_word = np.repeat(np.arange(len(counts)), counts)
    starts = np.arange(total)
    inside = starts + length <= ends[text_of_word[:total]]  # a sequence does not cross two texts
    owner = text_of_word[:total][inside]
    return hashes[inside], owner, np.bincount(owner, minlength=len(counts))


def repeated_share(texts: Sequence[str], length: int = SEQUENCE_WORDS) -> NDArray[np.float64]:
    """Return, for every text (N,), the share of its word sequences that stand in a text before it.

    A text of fewer than `length` words has share 0: section titles must repeat.
    """
    hashes, owner, sizes = _sequences(texts, length)
    _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    earlier = owner[first][inverse] < owner
    repeated = np.bincount(owner, weights=earlier, minlength=len(sizes))
    return repeated / np.maximum(sizes, 1)


def near_duplicates(texts: Sequence[str], max_repeated: float = MAX_REPEATED) -> NDArray[np.bool_]:
    """Return which texts (N,) repeat the ones before them; the first of a group always stays."""
    return repeated_share(texts) >= max_repeated


@dataclass(frozen=True)
class Leakage:
    """What of a validation text stands in the training text, as fractions."""

    lines: float  # of lines with at least MIN_LINE_CHARACTERS, stripped
    characters: float  # of the characters of those lines


def leakage(training: str, validation: str) -> Leakage:
    """Measure how many lines of `validation` stand in `training`.

    Raises ValueError for a validation text without lines.
    """
    held_out = _lines(validation)
    if not held_out:
        raise ValueError(f"no validation line of {MIN_LINE_CHARACTERS} or more characters; give more text")
    seen = set(_lines(training))
    leaked = [line for line in held_out if line in seen]
    return Leakage(len(leaked) / len(held_out), sum(map(len, leaked)) / sum(map(len, held_out)))


def sequence_leakage(training: Iterable[str], validation: Iterable[str]) -> float:
    """Return the fraction of the `validation` texts' six-word sequences that stand in `training` texts."""
    seen = np.unique(_sequences(training, SEQUENCE_WORDS)[0])
    sequences = _sequences(validation, SEQUENCE_WORDS)[0]
    return float(np.isin(sequences, seen).mean()) if len(sequences) else 0.0


def _lines(text: str) -> list[str]:
    stripped = (line.strip() for line in text.split("\n"))
    return [line for line in stripped if len(line) >= MIN_LINE_CHARACTERS]
