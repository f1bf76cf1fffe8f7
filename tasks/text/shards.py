"""Token shards on disk, in the layout of llm.c and modded-nanogpt (`.bin`).

A header of 256 little-endian int32 (magic 20240520, version 1, token count, zeros), then the tokens as
little-endian uint16. nanoGPT's files have the tokens alone; they are read on request, never by guess.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.errors import UserError
from tasks.text.files import Buffer, write_whole

MAGIC = 20240520
VERSION = 1
HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS
TOKEN = np.dtype("<u2")


def write_shard(path: Path, tokens: NDArray[Any]) -> str:
    """Write `tokens` (N,) as one shard, whole; return the file's sha256.

    Raises ValueError for ids that uint16 cannot hold, and OSError.
    """
    if len(tokens) and (tokens.min() < 0 or tokens.max() >= 1 << 16):
        raise ValueError(f"{path}: ids from {tokens.min()} to {tokens.max()}, expected 0 to 65535 (uint16)")
    return write_chunks(path, len(tokens), [np.ascontiguousarray(tokens, dtype=TOKEN).tobytes()])


def write_chunks(path: Path, count: int, chunks: Iterable[Buffer]) -> str:
    """Write `count` tokens, which come as pieces of little-endian uint16, as one shard; return its sha256.

    Raises ValueError, leaving nothing behind, where the pieces are not `count` tokens, and OSError.
    """
    header = np.zeros(HEADER_INTS, dtype="<i4")
    header[:3] = MAGIC, VERSION, count

    def checked() -> Iterable[Buffer]:
        yield header.tobytes()
        size = 0
        for chunk in chunks:
            size += memoryview(chunk).nbytes
            yield chunk
        if size != count * TOKEN.itemsize:
            raise ValueError(f"{path}: {size} bytes of tokens came, expected {count * TOKEN.itemsize}")

    return write_whole(path, checked())


def open_shard(path: Path, *, headerless: bool = False) -> NDArray[np.uint16]:
    """Return a shard's tokens, memory-mapped (N,) uint16.

    Raises UserError, naming the file, for a wrong magic or version, a size that is not what the header says,
    a file without tokens and one that cannot be read.
    """
    offset = 0 if headerless else HEADER_BYTES
    try:
        size = path.stat().st_size
        if not headerless:
            count = _header_count(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); expected a .bin token shard") from None
    if headerless:
        count = size // TOKEN.itemsize
    expected = offset + count * TOKEN.itemsize
    if size != expected:
        raise UserError(f"{path}: {size} bytes, expected {expected} for {count} tokens; the shard is damaged")
    if count < 1:
        raise UserError(f"{path}: no tokens in it; remove the shard")
    return np.memmap(path, dtype=TOKEN, mode="r", offset=offset, shape=(count,))


def _header_count(path: Path) -> int:
    header = np.fromfile(path, dtype="<i4", count=3)
    if len(header) < 3 or header[0] != MAGIC:
        raise UserError(
            f"{path}: no token shard (its header does not start with {MAGIC}); "
            "for nanoGPT's files without a header ask for headerless"
        )
    if header[1] != VERSION:
        raise UserError(f"{path}: shard version {header[1]}, expected {VERSION}; prepare the data again")
    return int(header[2])


class TokenShards:
    """Several shards as one sequence of tokens: slices read only what they cover, across borders too.

    A shard may be cut short or overwritten while a run reads it. What is read is held against the size the
    file had and, where it is known, the size of the vocabulary.
    """

    def __init__(
        self, paths: Sequence[Path], *, headerless: bool = False, vocab_size: int | None = None
    ) -> None:
        """Map all `paths`, in the order given. Raises UserError as `open_shard`, and for no paths."""
        if not paths:
            raise UserError("no token shards were given, expected at least one .bin file")
        self._paths, self._vocab_size = list(paths), vocab_size
        self._shards = [open_shard(path, headerless=headerless) for path in paths]
        self._sizes = [path.stat().st_size for path in paths]
        self._ends = list(accumulate(len(shard) for shard in self._shards))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, key: slice) -> NDArray[np.uint16]:
        """Return tokens `start:stop` as an array of their own (K,); a step is not supported.

        Raises UserError for a shard that has changed since, or that holds ids the vocabulary has not.
        """
        start, stop, step = key.indices(len(self))
        if step != 1:
            raise ValueError(f"token shards are read with step 1, got {step}")
        parts = []
        shard = bisect_right(self._ends, start)
        while start < stop:
            begin = self._ends[shard] - len(self._shards[shard])
            end = min(stop, self._ends[shard])
            parts.append(self._read(shard, start - begin, end - begin))
            start, shard = end, shard + 1
        return np.concatenate(parts) if parts else np.empty(0, dtype=TOKEN)

    def _read(self, shard: int, start: int, stop: int) -> NDArray[np.uint16]:
        path = self._paths[shard]
        try:
            size = path.stat().st_size
        except OSError as error:
            raise UserError(f"{path}: can no longer be read ({error.strerror}); restore the shard") from None
        if size != self._sizes[shard]:  # reading a map beyond its file's end would kill the process
            raise UserError(
                f"{path}: {size} bytes now, {self._sizes[shard]} when the run began; restore the shard"
            )
        part = self._shards[shard][start:stop]
        if self._vocab_size is not None and part.max(initial=0) >= self._vocab_size:
            raise UserError(
                f"{path}: holds token {part.max()}, the vocabulary ends at {self._vocab_size - 1}; the shard "
                "is damaged, or the tokenizer another"
            )
        return part
