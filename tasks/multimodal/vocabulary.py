"""Text as numbers: whole words where the words are known, bytes where they are not.

Numbers 0, 1 and 2 are padding, begin and end of a text in both.
"""

from collections.abc import Sequence
from typing import Protocol

PAD, BEGIN, END = 0, 1, 2
SPECIAL = 3
PUNCTUATION = ":,?"


class Vocabulary(Protocol):
    """Between texts and numbers; `size` numbers in all, the special ones included."""

    name: str
    size: int

    def encode(self, text: str) -> list[int]:
        """Return the numbers of a text, without special ones. Raises ValueError for what it cannot say."""

    def decode(self, numbers: Sequence[int]) -> str:
        """Return the text of numbers; special ones are left out."""


class Words:
    """A fixed list of words and signs.

    Args:
        words: the list; its order gives the numbers.
    """

    name = "words"

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)
        self.size = SPECIAL + len(self.words)
        self._numbers = {word: number for number, word in enumerate(self.words, SPECIAL)}

    def encode(self, text: str) -> list[int]:
        """See `Vocabulary`."""
        for sign in PUNCTUATION:
            text = text.replace(sign, f" {sign} ")
        unknown = next((word for word in text.split() if word not in self._numbers), None)
        if unknown is not None:
            raise ValueError(f"'{unknown}' is none of the {len(self.words)} words of the vocabulary")
        return [self._numbers[word] for word in text.split()]

    def decode(self, numbers: Sequence[int]) -> str:
        """See `Vocabulary`."""
        text = " ".join(self.words[number - SPECIAL] for number in numbers if number >= SPECIAL)
        for sign in PUNCTUATION:
            text = text.replace(f" {sign}", sign)
        return text


class Bytes:
    """UTF-8, a byte a number."""

    name = "bytes"
    size = SPECIAL + 256

    def encode(self, text: str) -> list[int]:
        """See `Vocabulary`."""
        return [SPECIAL + byte for byte in text.encode()]

    def decode(self, numbers: Sequence[int]) -> str:
        """See `Vocabulary`."""
        return bytes(number - SPECIAL for number in numbers if number >= SPECIAL).decode(errors="replace")


def padded(numbers: Sequence[int], length: int, filler: int = PAD) -> list[int]:
    """Return numbers cut or filled to a length."""
    return [*numbers[:length], *[filler] * (length - len(numbers))]
