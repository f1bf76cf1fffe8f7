"""Records on disk: one JSON file per run, written whole, read back exactly or refused by name."""

from __future__ import annotations

from pathlib import Path

from results.jsonio import dumps, loads, write_whole
from results.record import Record, parse_record, to_plain


def write_record(record: Record, directory: str | Path) -> Path:
    """Write ``record`` as ``<run_id>.json`` into ``directory`` (made if absent) and return the path.

    The file appears whole or not at all; an earlier record of the same run is replaced. The record is checked
    once more first, since its lists and dictionaries may have been changed in place since it was made. Raises
    ``ValueError`` when it no longer fits the schema and ``OSError`` when the disk refuses.
    """
    data = to_plain(record)
    text = dumps(to_plain(parse_record(data)))
    return write_whole(Path(directory) / record.file_name, text.encode("utf-8"))


def read_record(path: str | Path) -> Record:
    """Return the record in ``path``. Raises ``ValueError`` with one line that names the file."""
    path = Path(path)
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise ValueError(f"{path}: no such record") from None
    except IsADirectoryError:
        raise ValueError(f"{path}: a directory, expected a record file; use load_records") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not a record: the file is not UTF-8 text; restore or remove it") from None
    try:
        data = loads(text)
    except ValueError as error:
        raise ValueError(f"{path}: not a whole JSON file ({error}); restore or remove it") from None
    try:
        return parse_record(data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def load_records(directory: str | Path) -> list[Record]:
    """Return every record below ``directory``, ordered by path; hidden files are passed over.

    A corrupt or foreign ``.json`` file, or two files that claim the same run, is a ``ValueError`` that names
    the file: a report over silently dropped records would not be a report over the records.
    """
    root = Path(directory)
    if not root.is_dir():
        raise ValueError(f"{root}: no such directory of records; run something first or give another path")
    paths = [
        path
        for path in root.rglob("*.json")
        if not any(part.startswith(".") for part in path.relative_to(root).parts)
    ]
    seen: dict[str, Path] = {}
    records: list[Record] = []
    for path in sorted(paths, key=lambda path: path.relative_to(root).as_posix()):
        record = read_record(path)
        if record.run_id in seen:
            raise ValueError(f"{path}: run {record.run_id} is also in {seen[record.run_id]}; keep one")
        seen[record.run_id] = path
        records.append(record)
    return records
