"""What stays bounded: memory while reading, and how many processes work on one set."""

import gzip
import random
import threading
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from filelock import FileLock
from prepare_bench import Bench, make_documents, write_json_lines

from tasks.runner.progress import Silent
from tasks.text.prepare.job import prepare
from tasks.text.prepare.plan import PieceReader, Reading, scan
from tasks.text.prepare.sources import local_source

MB = 1 << 20


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_reading_a_file_holds_little_of_it(tmp_path: Path, suffix: str) -> None:
    import zstandard

    pack = {"": bytes, ".gz": lambda data: gzip.compress(data, 1), ".zst": zstandard.compress}[suffix]
    path = tmp_path / f"a.jsonl{suffix}"
    draw = random.Random(0)  # text that compresses like text, to about a half
    lines = [b'{"text": "%s"}\n' % draw.randbytes(500).hex().encode() for _ in range(24 * MB // 1000)]
    path.write_bytes(pack(b"".join(lines)))
    source, reading = local_source([str(path)]), Reading(unit_bytes=8 * MB)
    reader = PieceReader(source, reading)
    tracemalloc.start()
    try:
        pieces = scan(source, 0, reading).pieces
        count = sum(1 for piece in pieces for _ in reader.documents(piece))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        reader.close()
    assert count == len(lines)
    assert len(pieces) > 2
    assert peak < 6 * MB  # the file is 24 MB


def test_a_row_group_is_read_page_by_page(tmp_path: Path) -> None:
    text = "some words of a document that do not repeat in a dictionary "
    rows = [f"{i} {text * 16}" for i in range(40_000)]  # 40 MB in one row group
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": rows}), path, row_group_size=len(rows), use_dictionary=False)
    del rows
    source, reading = local_source([str(path)]), Reading(unit_bytes=8 * MB)
    (piece,) = scan(source, 0, reading).pieces
    reader = PieceReader(source, reading)
    before = pa.total_allocated_bytes()
    most = count = 0
    for _ in reader.documents(piece):
        count += 1
        most = max(most, pa.total_allocated_bytes() - before)
    reader.close()
    assert count == 40_000
    assert most < 12 * MB


def test_a_second_process_waits_says_so_and_finds_the_set_finished(bench: Bench, inline: None) -> None:
    source = write_json_lines(bench.root / "a.jsonl", make_documents(30))
    said, results = [], []

    class Display(Silent):
        def note(self, line: str) -> None:
            said.append(line)
            waiting.set()

    waiting = threading.Event()
    out = bench.root / "out"
    out.mkdir()
    lock = FileLock(out / ".lock", thread_local=False, is_singleton=False)
    with lock:
        second = threading.Thread(
            target=lambda: results.append(prepare(bench.settings(source), out, Display())), daemon=True
        )
        second.start()
        assert waiting.wait(timeout=30)
        assert not results
    second.join(timeout=60)
    assert said == [f"waiting for another process that prepares {out}"]
    assert results[0]["splits"]["train"]["documents"] > 0
