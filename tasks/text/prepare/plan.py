"""The plan of a job: the units of work, fixed before the work starts and kept for whoever resumes it.

A unit is some pieces of files, up to some MB of text: small enough that a kill loses seconds, large
enough that writing its parts costs nothing. A piece is a range of row groups of a Parquet file or a range of
bytes of a text file whose ends lie where documents start.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from tasks.errors import UserError
from tasks.text.prepare.documents import (
    CorruptError,
    Document,
    Reader,
    damage,
    json_lines,
    lines,
    next_start,
    paragraphs,
    parquet_rows,
    text_lines,
    whole,
)
from tasks.text.prepare.sources import File, Source, open_file

UNIT_BYTES = (1 << 20, 16 << 20)  # the smallest and the largest unit
UNITS = 64  # of a source too small for the largest: enough to keep many processes busy to the end


@dataclass(frozen=True)
class Piece:
    """Row groups (Parquet) or bytes of the text (else) `start`..`stop`-1 of file number `file`."""

    file: int
    start: int
    stop: int
    size: int  # bytes of text, roughly for Parquet: what progress counts


def unit_bytes(source: Source) -> int:
    """Return how much text a unit of a source should hold."""
    smallest, largest = UNIT_BYTES
    return max(smallest, min(largest, sum(file.size for file in source.files) // UNITS))


@dataclass(frozen=True)
class Scan:
    """What a look at one file found: its pieces, and what of it cannot be read."""

    pieces: list[Piece]
    corrupt: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {"pieces": [list(asdict(piece).values()) for piece in self.pieces], "corrupt": self.corrupt}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Scan":
        """Return what `to_json` was given."""
        return cls([Piece(*row) for row in data["pieces"]], data["corrupt"])


@dataclass(frozen=True)
class Reading:
    """How documents are found in files."""

    column: str = "text"
    documents: str = "file"  # of a plain text file: file, paragraphs or lines
    limit: int = 64 << 20  # bytes of the longest document taken
    unit_bytes: int | None = None  # of text; None: by the size of the source. No token depends on it

    def layout(self, file: File) -> str:
        """Return what parts documents in a text file: file, paragraphs or lines."""
        return "lines" if file.format == "json" else self.documents


def scan(source: Source, number: int, reading: Reading) -> Scan:
    """Cut file `number` into pieces; for a compressed file this reads all of it once.

    Raises UserError for a file without the column, OSError, and the hub's errors.
    """
    assert reading.unit_bytes is not None, "the job sets the size of a unit"
    file = source.files[number]
    pieces: list[Piece] = []
    try:
        finder = _parquet_pieces if file.format == "parquet" else _text_pieces
        for piece in finder(source, number, reading):
            pieces.append(piece)
    except CorruptError as error:
        return Scan(pieces, str(error))
    return Scan(pieces)


def _parquet_pieces(source: Source, number: int, reading: Reading) -> Iterator[Piece]:
    with open_file(source, source.files[number]) as stream:
        metadata = open_parquet(stream).metadata
        with damage():
            names = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
        if reading.column not in names:
            raise UserError(
                f"{source.files[number].name}: no column '{reading.column}', it has {', '.join(names)}; "
                "name the one with the text, --column NAME"
            )
        place = names.index(reading.column)
        _check_texts(source.files[number], metadata, place)
        first, size = 0, 0
        for group in range(metadata.num_row_groups):
            size += metadata.row_group(group).column(place).total_uncompressed_size
            if size >= reading.unit_bytes or group == metadata.num_row_groups - 1:
                yield Piece(number, first, group + 1, size)
                first, size = group + 1, 0


def _check_texts(file: File, metadata: Any, place: int) -> None:
    kind = metadata.schema.column(place).physical_type
    if kind != "BYTE_ARRAY":
        name = metadata.schema.column(place).path
        raise UserError(
            f"{file.name}: column '{name}' holds {kind}, expected text; name another with --column"
        )


def open_parquet(stream: Any) -> Any:
    """Return the open `pyarrow.parquet.ParquetFile`. Raises CorruptError."""
    import pyarrow.parquet as pq

    with damage():
        return pq.ParquetFile(stream, pre_buffer=False, buffer_size=1 << 20)


def _text_pieces(source: Source, number: int, reading: Reading) -> Iterator[Piece]:
    file = source.files[number]
    layout = reading.layout(file)
    reader = Reader(open_file(source, file), file.compression)
    try:
        if file.format == "json":
            _check_column(file, reader, reading)
        size = file.size if reader.seekable else None
        start = 0
        while True:
            if layout == "file":
                stop = _end(reader, size)
                if stop > reading.limit:
                    raise UserError(
                        f"{file.name}: one document of {stop} bytes, expected at most {reading.limit}; "
                        "split it with --documents paragraphs or lines, or raise --max-document"
                    )
            else:
                reader.move(max(start + reading.unit_bytes, reader.offset))
                stop = next_start(reader, layout, reading.limit)
            if stop <= start:
                return
            yield Piece(number, start, stop, stop - start)
            if layout == "file" or (size is not None and stop >= size):
                return
            start = stop
    finally:
        reader.close()


def _end(reader: Reader, size: int | None) -> int:
    return size if size is not None else reader.move(1 << 62)


def _check_column(file: File, reader: Reader, reading: Reading) -> None:
    """Look at the first line: a wrong column is said at once, not counted in every document."""
    import json

    first = next(
        (line for _, line in lines(reader, 1 << 62, reading.limit) if line is None or line.strip()), None
    )
    try:
        row = json.loads(first) if first else None
    except ValueError:
        row = None  # a bad line is counted later
    if isinstance(row, dict) and reading.column not in row:
        raise UserError(
            f"{file.name}: no column '{reading.column}' in its first line, it has {', '.join(row)}; "
            "name the one with the text, --column NAME"
        )
    if reader.seekable:
        reader.move(0)


def units(scans: Iterable[Scan], unit_bytes: int) -> list[list[Piece]]:
    """Return the pieces of all files, in order, gathered into units: small files share one."""
    result: list[list[Piece]] = []
    held: list[Piece] = []
    size = 0
    for piece in (piece for found in scans for piece in found.pieces):
        if held and size + piece.size > unit_bytes:
            result.append(held)
            held, size = [], 0
        held.append(piece)
        size += piece.size
    return [*result, held] if held else result


class PieceReader:
    """Reads pieces, and keeps the last file open: the next piece is most often the one that follows."""

    def __init__(self, source: Source, reading: Reading) -> None:
        self.source, self.reading = source, reading
        self._open: tuple[int, Any, Callable[[], None]] | None = None

    def documents(self, piece: Piece) -> Iterator[Document]:
        """Yield the documents of a piece. Raises CorruptError, OSError and the hub's errors."""
        file = self.source.files[piece.file]
        column, limit = self.reading.column, self.reading.limit
        opened = self._file(piece)
        if file.format == "parquet":
            yield from parquet_rows(opened, piece.start, piece.stop, column, limit)
            return
        opened.move(piece.start)
        if file.format == "json":
            yield from json_lines(opened, piece.stop, column, limit)
        else:
            read = {"file": whole, "paragraphs": paragraphs, "lines": text_lines}[self.reading.documents]
            yield from read(opened, piece.stop, limit)

    def _file(self, piece: Piece) -> Any:
        file = self.source.files[piece.file]
        if self._open is not None:
            number, opened, close = self._open
            back = file.format != "parquet" and not opened.seekable and piece.start < opened.offset
            if number == piece.file and not back:
                return opened
            close()
        self._open = None
        stream = open_file(self.source, file)
        if file.format == "parquet":
            self._open = (piece.file, open_parquet(stream), stream.close)
        else:
            reader = Reader(stream, file.compression)
            self._open = (piece.file, reader, reader.close)
        return self._open[1]

    def close(self) -> None:
        """Close the file that is open."""
        if self._open is not None:
            self._open[2]()
            self._open = None
