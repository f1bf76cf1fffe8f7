"""Byte tokenizer: a token is a byte of the UTF-8 text, 256 symbols, nothing to download."""

import math
from collections.abc import Iterable


class ByteTokenizer:
    """Text to UTF-8 bytes and back. Every text has exactly one encoding, and every byte string decodes."""

    name = "bytes"
    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        """Return the bytes of `text` (N,). Raises ValueError for a lone surrogate, which UTF-8 lacks."""
        return list(text.encode("utf-8"))

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; bytes that are not UTF-8 become U+FFFD, as models may stop mid-character.

        Raises ValueError for an id outside 0..255.
        """
        ids = [int(i) for i in ids]
        wrong = next((i for i in ids if not 0 <= i < 256), None)
        if wrong is not None:
            raise ValueError(f"token {wrong} is no byte, expected 0 to 255; was another tokenizer used?")
        return bytes(ids).decode("utf-8", errors="replace")


def bits_per_byte(nats_per_token: float, tokens: int, n_bytes: int) -> float:
    """Return the loss in bits per byte of text: comparable between tokenizers.

    `nats_per_token` is the mean cross entropy over `tokens` targets that stand for `n_bytes` bytes of UTF-8.
    For the byte tokenizer both counts are equal. Raises ValueError for counts below one.
    """
    if tokens < 1 or n_bytes < 1:
        raise ValueError(f"expected at least one token and one byte, got {tokens} and {n_bytes}")
    return nats_per_token * tokens / (n_bytes * math.log(2))
