import gzip
import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.text.prepare.documents import NO_TEXT, NOT_JSON, NOT_UTF8, Document
from tasks.text.prepare.plan import PieceReader, Reading, Scan, scan, units
from tasks.text.prepare.sources import local_source

COMPRESS = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".zst": zstandard.compress,
    # Several members and frames in one file, as parallel compressors write them.
    ".2.gz": lambda data: gzip.compress(data[: len(data) // 2]) + gzip.compress(data[len(data) // 2 :]),
    ".2.zst": lambda data: zstandard.compress(data[:9]) + zstandard.compress(data[9:]),
}
BYTES = st.lists(
    st.sampled_from([b"\n", b"\n", b"\r\n", b" ", b"a", b"bc", "é".encode(), b"\xff"]), max_size=60
)


def read(path: Path, **reading) -> tuple[list[Document], Scan]:
    """Return the documents of all pieces, each piece read by a reader of its own, last piece first."""
    source, how = local_source([str(path)]), Reading(**{"unit_bytes": 1 << 20, **reading})
    found = scan(source, 0, how)
    result: list[Document] = []
    for piece in reversed(found.pieces):
        reader = PieceReader(source, how)
        result = [*reader.documents(piece), *result]
        reader.close()
    return result, found


def name_of(stem: str, suffix: str) -> str:
    """Return a file name; the compressions with a number are told apart in the table alone."""
    return stem + suffix.replace(".2", "")


@pytest.mark.parametrize("suffix", COMPRESS)
@given(BYTES.map(b"".join), st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_lines_of_all_ranges_are_the_lines_of_the_file(
    tmp_path_factory, suffix: str, data: bytes, unit_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("lines") / name_of("a.txt", suffix)
    path.write_bytes(COMPRESS[suffix](data))
    documents, found = read(path, documents="lines", unit_bytes=unit_bytes, limit=1000)
    lines = data.split(b"\n")
    ended = [line.removesuffix(b"\r") for line in lines[:-1]] + lines[-1:]
    assert [document.text for document in documents] == [line for line in ended if line.strip()]
    assert [piece.start for piece in found.pieces[1:]] == [piece.stop for piece in found.pieces[:-1]]


@pytest.mark.parametrize("suffix", ["", ".gz"])
@given(BYTES.map(b"".join), st.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_paragraphs_of_all_ranges_are_the_paragraphs_of_the_file(
    tmp_path_factory, suffix: str, data: bytes, unit_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("paragraphs") / name_of("a.txt", suffix)
    path.write_bytes(COMPRESS[suffix](data))
    documents, _ = read(path, documents="paragraphs", unit_bytes=unit_bytes, limit=1000)
    expected: list[list[bytes]] = [[]]
    lines = data.split(b"\n")
    for line in [line.removesuffix(b"\r") for line in lines[:-1]] + lines[-1:]:
        if line.strip():
            expected[-1].append(line)
        else:
            expected.append([])
    assert [document.text for document in documents] == [b"\n".join(lines) for lines in expected if lines]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_json_lines_come_back_whatever_the_size_of_a_range(tmp_path: Path, suffix: str) -> None:
    texts = [f"text {i} é\n" * (i % 7) for i in range(50)]
    lines = [json.dumps({"text": text, "n": 1}, ensure_ascii=i % 2 == 0) for i, text in enumerate(texts)]
    path = tmp_path / name_of("a.jsonl", suffix)
    path.write_bytes(COMPRESS[suffix]("\n".join(lines).encode("utf-8")))
    for unit_bytes in (1, 100, 1 << 20):
        documents, found = read(path, unit_bytes=unit_bytes)
        assert [document.text.decode() for document in documents] == texts
        assert len(found.pieces) > 1 or unit_bytes == 1 << 20


def test_bad_lines_are_named_and_their_neighbours_kept(tmp_path: Path) -> None:
    lines = [
        b'{"text": "one"}',
        b'{"text": "\xff"}',
        b'{"text": ',
        b'{"text": 7}',
        b'{"other": "x"}',
        b"[1]",
        b'{"text": "\\ud800"}',
        b'{"text": "' + b"y" * 500 + b'"}',
        b'{"text": "two"}',
    ]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(lines))
    for unit_bytes in (1, 1000):
        documents, _ = read(path, unit_bytes=unit_bytes, limit=100)
        problems = [document.problem for document in documents]
        too_long = "longer than 100 bytes"
        assert problems == [None, NOT_UTF8, NOT_JSON, NO_TEXT, NO_TEXT, NO_TEXT, NOT_UTF8, too_long, None]
        assert documents[1].place == "byte 16"
        assert documents[-1].text == b"two"


@pytest.mark.parametrize("kind", ["lines", "paragraphs"])
def test_the_limit_is_exact_and_never_held_in_memory_beyond(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"x" * 100 + b"\n\n" + b"y" * 101 + b"\n\n" + b"z" * 99999 + b"\n\n" + b"end")
    for unit_bytes in (3, 1 << 20):
        documents, _ = read(path, documents=kind, unit_bytes=unit_bytes, limit=100)
        assert [document.problem is None for document in documents] == [True, False, False, True]
        assert [len(document.text) for document in documents if document.problem is None] == [100, 3]


@pytest.mark.parametrize("type_", [pa.string(), pa.large_string(), pa.binary()])
def test_parquet_rows_come_back_by_row_group(tmp_path: Path, type_) -> None:
    texts = [None if i % 11 == 5 else f"row {i} é" * (i % 5) for i in range(100)]
    values = [text.encode() if text is not None and type_ == pa.binary() else text for text in texts]
    path = tmp_path / "a.parquet"
    table = pa.table({"n": list(range(100)), "text": pa.array(values, type_)})
    pq.write_table(table, path, row_group_size=7)
    for unit_bytes in (1, 300, 1 << 20):
        documents, found = read(path, unit_bytes=unit_bytes)
        assert [d.text.decode() if d.problem is None else None for d in documents] == texts
        assert [d.place for d in documents] == [f"row {i}" for i in range(100)]
    assert len(found.pieces) == 1


def test_a_parquet_text_that_is_not_utf8_does_not_hide_its_neighbours(tmp_path: Path) -> None:
    raw = pa.array([b"one", b"\xff\xfe", b"two"], pa.binary())
    column = pa.StringArray.from_buffers(3, raw.buffers()[1], raw.buffers()[2])
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    documents, _ = read(tmp_path / "a.parquet")
    assert [document.text for document in documents] == [b"one", b"\xff\xfe", b"two"]


def test_small_files_share_a_unit_and_the_order_stays(tmp_path: Path) -> None:
    for i in range(10):
        (tmp_path / f"{i}.txt").write_bytes(b"x" * (10 * i + 1))
    source = local_source([str(tmp_path)])
    found = [scan(source, number, Reading(unit_bytes=100)) for number in range(10)]
    gathered = units(found, 100)
    assert [piece.file for unit in gathered for piece in unit] == list(range(10))
    assert all(sum(piece.size for piece in unit) <= 100 or len(unit) == 1 for unit in gathered)
    assert len(gathered) < 10


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_cut_or_changed_compressed_file_is_corrupt_and_what_came_before_is_kept(
    tmp_path: Path, suffix: str
) -> None:
    draw = random.Random(0)
    lines = b"".join(b"%d %s\n" % (i, draw.randbytes(30).hex().encode()) for i in range(20000))
    packed = COMPRESS[suffix](lines)
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(packed[: len(packed) // 2])
    documents, found = read(path, documents="lines", unit_bytes=50000)
    assert found.corrupt
    assert found.pieces
    assert b"\n".join(document.text for document in documents) + b"\n" == lines[: found.pieces[-1].stop]
    path.write_bytes(b"no such magic" + packed)
    _, found = read(path, documents="lines")
    assert found.corrupt
    assert not found.pieces
