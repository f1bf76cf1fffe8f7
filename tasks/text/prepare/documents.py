"""Documents out of files: Parquet row groups, JSON lines and plain text, in bounded memory.

A text file is read as a stream of bytes from one offset to another, whether it is compressed or not; offsets
are those of the text, not of the compressed file. Both ends lie where a document starts, so that every
document belongs to exactly one range.
"""

import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any

SKIP_CHUNK = 1 << 20
BUFFER = 1 << 16  # of decompressed text read ahead
ZST_CHUNK = 1 << 12  # compressed bytes at once: even of zeros they give no more than some 100 MB
JSON_SLACK = 4  # a line of JSON may be this many times longer than the text in it: escapes, other columns
BATCH_ROWS = 256  # Parquet rows held at once

EMPTY, NOT_UTF8, NOT_JSON, NO_TEXT = "empty", "not UTF-8", "not JSON", "no text"


@dataclass(frozen=True)
class Document:
    """One document as it stands in a file, or why it cannot be used."""

    place: str  # "row 17" or "byte 4711"
    text: bytes  # UTF-8, not yet checked
    problem: str | None = None


class CorruptError(Exception):
    """A file is damaged: what is wrong, in a few words."""


class Reader:
    """A stream of bytes that knows its offset, moves forward, and never holds more than is asked for."""

    def __init__(self, raw: IO[bytes], compression: str | None) -> None:
        self.seekable = compression is None
        self._raw = raw
        self._stream = OPENERS[compression](raw)
        self._end = raw.seek(0, 2) if self.seekable else None  # a seek beyond it would go there
        if self.seekable:
            raw.seek(0)
        self.offset = 0

    def move(self, offset: int) -> int:
        """Go to `offset`, or to the end where that comes first; return where it is.

        Raises CorruptError, and ValueError for going back in a compressed file.
        """
        if self._end is not None:
            self.offset = self._stream.seek(min(offset, self._end))
            return self.offset
        if offset < self.offset:
            raise ValueError(f"a compressed stream at {self.offset} cannot go back to {offset}")
        while self.offset < offset:
            if not self._take(lambda: self._stream.read(min(SKIP_CHUNK, offset - self.offset))):
                break
        return self.offset

    def line(self, limit: int) -> bytes:
        """Return the rest of the line with its end, or its first `limit` bytes; nothing at the file's end."""
        return self._take(lambda: self._stream.readline(limit))

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes; fewer only at the end of the file."""
        return self._take(lambda: self._stream.read(size))

    def _take(self, function: Callable[[], bytes]) -> bytes:
        with damage():
            data = function()
        self.offset += len(data)
        return data

    def close(self) -> None:
        """Close the file."""
        self._stream.close()
        self._raw.close()


class damage:  # noqa: N801  (used like a function)
    """Turn what libraries raise for damaged files into CorruptError."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        if isinstance(error, EOFError | gzip.BadGzipFile | zlib.error) or _by_library(error):
            raise CorruptError(" ".join(str(error).split()) or type(error).__name__) from error


def _by_library(error: BaseException) -> bool:
    """Tell whether pyarrow or zstandard found a file damaged; an OSError with a number is the system's."""
    module = type(error).__module__.partition(".")[0]
    if module in {"pyarrow", "zstandard", "zstd"}:
        return not isinstance(error, MemoryError)
    return type(error) is OSError and error.errno is None  # how pyarrow says "corrupt snappy data"


class ZstStream(io.RawIOBase):
    """Text of a file of zstandard frames. Unlike the library's own stream it notices where a frame is cut."""

    def __init__(self, raw: IO[bytes]) -> None:
        import zstandard

        self._raw = raw
        self._new = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj
        self._frame: Any = None
        self._ready, self._taken = b"", 0

    def readable(self) -> bool:
        """Yes."""
        return True

    def readinto(self, target: Any) -> int:
        """Fill `target` as far as what is ready goes. Raises CorruptError for a frame without its end."""
        while self._taken == len(self._ready):
            data = self._raw.read(ZST_CHUNK)
            if not data:
                if self._frame is not None:
                    raise CorruptError("the last frame has no end")
                return 0
            self._ready, self._taken = self._decompress(data), 0
        piece = self._ready[self._taken : self._taken + len(target)]
        target[: len(piece)] = piece
        self._taken += len(piece)
        return len(piece)

    def _decompress(self, data: bytes) -> bytes:
        parts = []
        while data:
            self._frame = self._frame or self._new()
            parts.append(self._frame.decompress(data))
            data = b""
            if self._frame.eof:
                data, self._frame = self._frame.unused_data, None
        return b"".join(parts)


OPENERS: dict[str | None, Callable[[IO[bytes]], Any]] = {
    None: lambda raw: raw,
    "gz": lambda raw: io.BufferedReader(gzip.GzipFile(fileobj=raw), BUFFER),
    "zst": lambda raw: io.BufferedReader(ZstStream(raw), BUFFER),
}


def next_start(reader: Reader, layout: str, limit: int) -> int:
    """Move to where the next document starts, at or after the present place; return the offset.

    `layout` is lines or paragraphs. The present place must not be 0.
    """
    _skip_line(reader, limit)  # the rest of a line, which may look blank and is not
    while layout == "paragraphs":
        before = reader.offset
        if _skip_line(reader, limit) or reader.offset == before:
            break
    return reader.offset


def _skip_line(reader: Reader, limit: int) -> bool:
    """Read to the end of the line, piece by piece; tell whether all of it was white space."""
    blank = True
    while piece := reader.line(limit):
        blank = blank and not piece.strip()
        if piece.endswith(b"\n"):
            break
    return blank


def lines(reader: Reader, stop: int, limit: int) -> Iterator[tuple[int, bytes | None]]:
    """Yield offset and bytes of every line up to `stop`, without its end; None for one beyond `limit`."""
    while reader.offset < stop:
        start = reader.offset
        piece = reader.line(limit + 2)  # and the end of the line
        if not piece:
            return
        whole = piece.endswith(b"\n")
        content = piece[:-1].removesuffix(b"\r") if whole else piece
        if not whole and len(piece) >= limit + 2:
            _skip_line(reader, limit)
        yield start, content if len(content) <= limit else None


def json_lines(reader: Reader, stop: int, column: str, limit: int) -> Iterator[Document]:
    """Yield the documents of a range of JSON lines; empty lines are no documents."""
    for start, line in lines(reader, stop, JSON_SLACK * limit):
        place = f"byte {start}"
        if line is None:
            yield Document(place, b"", too_long(limit))
        elif line.strip():
            yield _from_json(place, line, column, limit)


def _from_json(place: str, line: bytes, column: str, limit: int) -> Document:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return Document(place, b"", NOT_UTF8)
    except (ValueError, RecursionError):
        return Document(place, b"", NOT_JSON)
    text = row.get(column) if isinstance(row, dict) else None
    if not isinstance(text, str):
        return Document(place, b"", NO_TEXT)
    try:
        content = text.encode("utf-8")
    except UnicodeEncodeError:  # "\ud800" alone is valid JSON and no Unicode text
        return Document(place, b"", NOT_UTF8)
    return Document(place, b"", too_long(limit)) if len(content) > limit else Document(place, content)


def text_lines(reader: Reader, stop: int, limit: int) -> Iterator[Document]:
    """Yield every line that is not blank as a document."""
    for start, line in lines(reader, stop, limit):
        if line is None or line.strip():
            yield Document(f"byte {start}", line or b"", too_long(limit) if line is None else None)


def paragraphs(reader: Reader, stop: int, limit: int) -> Iterator[Document]:
    """Yield paragraphs, parted by blank lines, as documents."""
    held: list[bytes] = []
    begin, size = 0, 0
    for start, line in lines(reader, stop, limit):
        if line is not None and not line.strip():
            if size:
                yield _paragraph(begin, held, size, limit)
            held, size = [], 0
            continue
        begin = begin if size else start
        size += limit + 2 if line is None else len(line) + 1  # and its end
        if size <= limit + 1:
            held.append(line or b"")
        else:
            held = []  # too long already: only its length matters
    if size:
        yield _paragraph(begin, held, size, limit)


def _paragraph(begin: int, held: list[bytes], size: int, limit: int) -> Document:
    problem = too_long(limit) if size > limit + 1 else None
    return Document(f"byte {begin}", b"\n".join(held) if problem is None else b"", problem)


def whole(reader: Reader, stop: int, limit: int) -> Iterator[Document]:
    """Yield the whole file as one document."""
    text = reader.read(limit + 1)
    if len(text) > limit:
        yield Document("byte 0", b"", too_long(limit))
    else:
        yield Document("byte 0", text)


def parquet_rows(file: Any, first: int, last: int, column: str, limit: int) -> Iterator[Document]:
    """Yield the rows of row groups first..last-1 of an open `pyarrow.parquet.ParquetFile`.

    Only `column` is read, page by page. Raises CorruptError.
    """
    import pyarrow as pa

    row = sum(file.metadata.row_group(i).num_rows for i in range(first))
    batches = file.iter_batches(batch_size=BATCH_ROWS, row_groups=list(range(first, last)), columns=[column])
    while True:
        with damage():
            batch = next(batches, None)
            if batch is None:
                return
            # As bytes: one text that is not UTF-8 must not hide its neighbours.
            values = batch.column(0).cast(pa.large_binary()).to_pylist()
        for text in values:
            problem = NO_TEXT if text is None else too_long(limit) if len(text) > limit else None
            yield Document(f"row {row}", b"" if problem else text, problem)
            row += 1


def too_long(limit: int) -> str:
    """Return the reason for a document of more than `limit` bytes."""
    return f"longer than {limit} bytes"
