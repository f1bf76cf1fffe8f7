import errno
import gzip
import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prepare_bench import Bench, InlinePool, make_documents, texts_of, tokens_of, write_json_lines

from tasks.runner.progress import Silent
from tasks.text import files
from tasks.text.prepare import job, parts, writer
from tasks.text.prepare.job import prepare
from tasks.text.prepare.parts import held_out
from tasks.text.prepare.tokenizers import make_tokenizer
from tasks.text.prepare.verify import verify

DATA = Path(os.environ.get("XSA_TEST_DATA", Path(__file__).resolve().parents[5] / "shared" / "data"))
pytestmark = pytest.mark.usefixtures("inline")


def is_held_out(text: str, fraction: float) -> bool:
    """Decide from the definition: 8 bytes of BLAKE2b, little-endian, as a fraction of 2^64."""
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest()
    return sum(byte << 8 * i for i, byte in enumerate(digest)) / 2**64 < fraction


def test_every_document_is_in_exactly_one_split_in_its_order(bench: Bench) -> None:
    documents = make_documents(300)
    source = write_json_lines(bench.root / "a.jsonl", documents)
    manifest = bench.prepare("out", source)
    shards = bench.shards("out")
    for prefix, split, held in (("train", "train", False), ("val", "validation", True)):
        expected = [text for text in documents if is_held_out(text, 0.1) == held]
        assert texts_of(shards, prefix) == expected
        facts = manifest["splits"][split]
        assert facts["documents"] == len(expected)
        assert facts["text_bytes"] == sum(len(text.encode("utf-8")) for text in expected)
        assert facts["tokens"] == facts["text_bytes"] + facts["documents"]
        sizes = [row["tokens"] for row in facts["shards"]]
        assert all(size == 7000 for size in sizes[:-1])
        assert 0 < sizes[-1] <= 7000
        assert len(sizes) == -(-facts["tokens"] // 7000)
        for row in facts["shards"]:
            assert hashlib.sha256(shards[row["file"]]).hexdigest() == row["sha256"]
            assert len(shards[row["file"]]) == row["bytes"]
    assert len(manifest["splits"]["train"]["shards"]) > 3
    assert {path.name for path in (bench.root / "out").iterdir()} == {*shards, "manifest.json", ".lock"}


def test_the_shards_do_not_depend_on_how_the_work_is_cut_or_stored(bench: Bench) -> None:
    documents = make_documents(200)
    source = write_json_lines(bench.root / "a.jsonl", documents)
    bench.prepare("out", source)
    expected = bench.shards("out")
    for unit_bytes in (1, 977, 1 << 20):
        bench.prepare(f"unit{unit_bytes}", source, reading={"unit_bytes": unit_bytes})
        assert bench.shards(f"unit{unit_bytes}") == expected
    (bench.root / "b.jsonl.gz").write_bytes(gzip.compress(source.read_bytes()))
    pq.write_table(pa.table({"text": documents}), bench.root / "c.parquet", row_group_size=13)
    write_json_lines(bench.root / "d0.jsonl", documents[:77])
    write_json_lines(bench.root / "d1.jsonl", documents[77:])
    for name in ("b.jsonl.gz", "c.parquet", "d?.jsonl"):
        bench.prepare(f"from {name}", bench.root / name)
        assert bench.shards(f"from {name}") == expected


def test_what_is_held_out_does_not_depend_on_order_or_neighbours(bench: Bench) -> None:
    documents = make_documents(200)
    first = write_json_lines(bench.root / "a.jsonl", documents)
    second = write_json_lines(bench.root / "b.jsonl", documents[::-1] + make_documents(100, seed=1))
    bench.prepare("a", first)
    bench.prepare("b", second)
    held = Counter(texts_of(bench.shards("a"), "val"))
    assert sum(held.values()) > 5
    assert not held - Counter(texts_of(bench.shards("b"), "val"))
    assert not set(held) & set(texts_of(bench.shards("b"), "train"))


def test_about_the_asked_share_is_held_out() -> None:
    count, fraction = 20000, 0.05
    found = sum(held_out(f"document {i}".encode(), fraction) for i in range(count))
    assert abs(found - count * fraction) < 6 * (count * fraction * (1 - fraction)) ** 0.5
    assert not any(held_out(f"document {i}".encode(), 0.0) for i in range(1000))


def test_tokens_of_gpt2_begin_every_document_with_end_of_text(bench: Bench) -> None:
    documents = make_documents(40)
    source = write_json_lines(bench.root / "a.jsonl", documents)
    manifest = bench.prepare("out", source, tokenizer="gpt2", shard_tokens=500)
    gpt2 = make_tokenizer("gpt2")
    kept = [text for text in documents if not is_held_out(text, 0.1)]
    expected = np.concatenate([np.array([50256, *gpt2.encode(text)]) for text in kept])
    np.testing.assert_array_equal(tokens_of(bench.shards("out"), "train"), expected)
    assert manifest["tokenizer"]["vocab_size"] == 50257


def test_what_is_skipped_is_counted_and_named(bench: Bench) -> None:
    lines = [
        b'{"text": "good"}',
        b'{"text": "  \\n"}',
        b'{"text": ""}',
        b"{",
        b'{"text": "\xff"}',
        b'{"text": "' + b"x" * 200 + b'"}',
    ]
    (bench.root / "a.jsonl").write_bytes(b"\n".join(lines))
    manifest = bench.prepare("out", bench.root / "a.jsonl", reading={"limit": 100})
    assert manifest["skipped"]["documents"] == {
        "empty": 2,
        "not JSON": 1,
        "not UTF-8": 1,
        "longer than 100 bytes": 1,
    }
    assert manifest["skipped"]["examples"][0] == "a.jsonl, byte 17: empty"
    assert len(manifest["skipped"]["examples"]) == 5
    assert any("5 documents were skipped" in note for note in manifest["notes"])
    assert texts_of(bench.shards("out"), "train") == ["good"]


def test_invalid_utf8_in_a_text_file_is_counted(bench: Bench) -> None:
    (bench.root / "a.txt").write_bytes(b"fine\n\nbad \xff\n\nfine too\n")
    manifest = bench.prepare("out", bench.root / "a.txt", reading={"documents": "paragraphs"}, held_out=0.0)
    assert manifest["skipped"]["documents"] == {"not UTF-8": 1}
    assert texts_of(bench.shards("out"), "train") == ["fine", "fine too"]


def damaged_parquet(path: Path) -> list[str]:
    """Write 60 rows in 6 row groups with damage in the pages of the fourth; return the texts."""
    texts = make_documents(60)
    pq.write_table(
        pa.table({"text": texts}), path, row_group_size=10, compression="snappy", use_dictionary=False
    )
    group = pq.ParquetFile(path).metadata.row_group(3).column(0)
    data = bytearray(path.read_bytes())
    middle = group.data_page_offset + group.total_compressed_size // 2
    data[group.data_page_offset : middle + 20] = b"\xff" * (middle + 20 - group.data_page_offset)
    path.write_bytes(data)
    return texts


def test_a_corrupt_parquet_file_is_an_error_that_names_it_or_counted_on_request(bench: Bench) -> None:
    texts = damaged_parquet(bench.root / "bad.parquet")
    with pytest.raises(parts.CorruptError, match=r"bad\.parquet, row groups 3 to 3"):  # the pool words it
        bench.prepare("out", bench.root / "bad.parquet", reading={"unit_bytes": 1}, held_out=0.0)
    manifest = bench.prepare(
        "counted", bench.root / "bad.parquet", reading={"unit_bytes": 1}, held_out=0.0, skip_corrupt=True
    )
    (line,) = manifest["skipped"]["corrupt"]
    assert line.startswith("bad.parquet, row groups 3 to 3: nothing after ")
    found = texts_of(bench.shards("counted"), "train")
    assert found == texts[: len(found) - 20] + texts[40:]


@pytest.mark.parametrize("name", ["cut.parquet", "cut.jsonl.gz", "cut.jsonl.zst"])
def test_a_file_that_was_cut_short_is_found_before_the_work_begins(bench: Bench, name: str) -> None:
    import zstandard

    whole = write_json_lines(bench.root / "good.jsonl", make_documents(300))
    path = bench.root / name
    if name.endswith(".parquet"):
        pq.write_table(pa.table({"text": make_documents(300)}), path)
    else:
        pack = gzip.compress if name.endswith(".gz") else zstandard.compress
        path.write_bytes(pack(whole.read_bytes()))
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(ValueError, match=rf"{name}: corrupt.*--skip-corrupt") as caught:
        bench.prepare("out", whole, path)
    assert "\n" not in str(caught.value)
    manifest = bench.prepare("counted", whole, path, skip_corrupt=True)
    assert len(manifest["skipped"]["corrupt"]) == 1
    assert manifest["splits"]["train"]["documents"] >= 200


@pytest.mark.parametrize("where", ["part", "shard", "manifest"])
def test_a_full_disk_is_said_and_the_job_goes_on_when_there_is_space(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    source = write_json_lines(bench.root / "a.jsonl", make_documents(200))
    bench.prepare("whole", source)
    endings = {"part": "3.train", "shard": "train_000002.bin", "manifest": "manifest.json"}

    def full(path: Path, chunks) -> str:
        if path.name.endswith(endings[where]):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return files.write_whole(path, chunks)

    from tasks.text import shards
    from tasks.text.prepare import manifest as manifests

    with pytest.MonkeyPatch.context() as patch:
        for module in (parts, shards, writer, job, manifests):
            patch.setattr(module, "write_whole", full)
        with pytest.raises(ValueError, match="the disk is full; free some space") as caught:
            bench.prepare("out", source)
    assert "\n" not in str(caught.value)
    assert not (bench.root / "out" / "manifest.json").exists()
    bench.prepare("out", source)
    assert bench.shards("out") == bench.shards("whole")


def test_a_finished_set_is_returned_as_it_is_and_never_mixed_with_another(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_json_lines(bench.root / "a.jsonl", make_documents(100))
    manifest = bench.prepare("out", source)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "Pool", None)  # there is nothing to do
        assert bench.prepare("out", source, workers=3) == manifest
    for change in ({"held_out": 0.2}, {"tokenizer": "gpt2"}, {"shard_tokens": 8000}):
        with pytest.raises(ValueError, match="holds a set of other sources or settings"):
            bench.prepare("out", source, **change)
    changed = bench.prepare("out", source, held_out=0.2, fresh=True)
    assert changed["settings"]["held_out"] == 0.2
    assert changed["fingerprint"] != manifest["fingerprint"]
    source.write_text(source.read_text() + '{"text": "one more"}\n')
    with pytest.raises(ValueError, match="holds a set of other sources"):
        bench.prepare("out", source, held_out=0.2)


def test_an_unfinished_job_goes_on_with_its_own_settings_alone(bench: Bench) -> None:
    source = write_json_lines(bench.root / "a.jsonl", make_documents(100))

    class Dying(InlinePool):
        def answers(self, requests, count):
            for number, result in enumerate(super().answers(requests, count)):
                if number == 3:
                    raise KeyboardInterrupt
                yield result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "Pool", Dying)
        with pytest.raises(KeyboardInterrupt):
            bench.prepare("out", source)
    with pytest.raises(ValueError, match=r"no manifest\.json \(its preparation did not finish"):
        verify(bench.root / "out")
    with pytest.raises(ValueError, match="an unfinished set of other settings"):
        bench.prepare("out", source, held_out=0.2)
    bench.prepare("out", source)
    bench.prepare("whole", source)
    assert bench.shards("out") == bench.shards("whole")


def test_a_directory_with_shards_of_others_is_left_alone(bench: Bench) -> None:
    source = write_json_lines(bench.root / "a.jsonl", make_documents(5))
    (bench.root / "out").mkdir()
    (bench.root / "out" / "fineweb_train_000001.bin").write_bytes(b"precious")
    for fresh in (False, True):
        with pytest.raises(ValueError, match=r"holds fineweb_train_000001\.bin and no manifest"):
            bench.prepare("out", source, fresh=fresh)
    assert (bench.root / "out" / "fineweb_train_000001.bin").read_bytes() == b"precious"


@pytest.mark.parametrize(
    ("name", "content", "changes", "message"),
    [
        ("a.jsonl", b'{"body": "x", "n": 1}', {}, "no column 'text' in its first line, it has body, n"),
        ("a.jsonl", b"", {}, "no document in the source"),
        ("a.jsonl", b'{"text": " "}', {}, r"no document in the source \(empty 1\)"),
        ("a.csv", b"text", {}, "the name tells no format"),
        ("a.txt", b"x" * 101, {"reading": {"limit": 100}}, "one document of 101 bytes.*--documents"),
        ("a.txt", b"x", {"held_out": 1.0}, "--held-out: 1.0, expected"),
        ("a.txt", b"x", {"shard_tokens": 0}, "--shard-tokens: 0, expected at least 1"),
        ("a.txt", b"x", {"workers": 0}, "--workers: 0, expected at least 1"),
        ("a.parquet", b"PAR1 or not", {}, r"a\.parquet: corrupt"),
    ],
)
def test_mistakes_are_errors_of_one_line(
    bench: Bench, name: str, content: bytes, changes: dict, message: str
) -> None:
    (bench.root / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        bench.prepare("out", bench.root / name, **changes)
    assert "\n" not in str(caught.value)


def test_wrong_columns_of_parquet_are_named(bench: Bench) -> None:
    pq.write_table(pa.table({"body": ["x"], "n": [1]}), bench.root / "a.parquet")
    with pytest.raises(ValueError, match=r"no column 'text', it has body, n; .*--column"):
        bench.prepare("out", bench.root / "a.parquet")
    with pytest.raises(ValueError, match="column 'n' holds INT64, expected text"):
        bench.prepare("out", bench.root / "a.parquet", reading={"column": "n"})
    with pytest.raises(ValueError, match="absent"):
        bench.prepare("out", bench.root / "absent*.parquet")
    with pytest.raises(ValueError, match="no source"):
        bench.prepare("out")


def test_verify_finds_every_damage(bench: Bench) -> None:
    source = write_json_lines(bench.root / "a.jsonl", make_documents(200))
    bench.prepare("out", source)
    directory = bench.root / "out"
    _, checks = verify(directory)
    assert [check.problems for check in checks] == [[], []]
    assert [check.documents for check in checks] == [
        facts["documents"]
        for facts in json.loads((directory / "manifest.json").read_text())["splits"].values()
    ]
    path = directory / "train_000001.bin"
    good = path.read_bytes()
    flipped = good[:2000] + bytes([good[2000] ^ 1]) + good[2001:]
    for content, message in (
        (good[:-2], "damaged"),
        (flipped, "sha256"),
        (b"\0" * 4 + good[4:], "no token shard"),
        (good[:2000] + b"\xff\xff" + good[2002:], "token 65535, expected less than 257"),
    ):
        path.write_bytes(content)
        problems = [problem for check in verify(directory)[1] for problem in check.problems]
        assert any(message in problem and str(path) in problem for problem in problems)
    path.unlink()
    (directory / "train_000099.bin").write_bytes(good)
    problems = [problem for check in verify(directory, quick=True)[1] for problem in check.problems]
    assert any("train_000001.bin" in problem for problem in problems)
    assert any("train_000099.bin: not in the manifest" in problem for problem in problems)
    text = (directory / "manifest.json").read_text()
    (directory / "manifest.json").write_text(text.replace('"sha256": "', '"sha256": "0', 1))
    with pytest.raises(ValueError, match="fingerprint does not fit"):
        verify(directory)


def test_real_rows_in_the_columns_of_fineweb(bench: Bench) -> None:
    folder = DATA / "commoncrawl_fineweb_schema"
    if not folder.is_dir():
        pytest.skip(f"no {folder}; set XSA_TEST_DATA to a folder that has commoncrawl_fineweb_schema")
    rows = pq.read_table(folder / "000_00000.parquet").to_pylist()
    changes = {"tokenizer": "gpt2", "shard_tokens": 10000}
    manifest = bench.prepare("parquet", folder / "000_00000.parquet", **changes)
    facts = manifest["splits"].values()
    # The data set's own counts of tokens, and one end of text per document.
    assert sum(f["tokens"] for f in facts) == sum(row["token_count"] for row in rows) + len(rows)
    assert sum(f["documents"] for f in facts) == len(rows) == 20
    bench.prepare("lines", folder / "sample.jsonl", **changes)
    assert bench.shards("lines") == bench.shards("parquet")


def test_real_texts_by_paragraph_come_back(bench: Bench) -> None:
    source = DATA / "wikitext2" / "valid.txt"
    if not source.is_file():
        pytest.skip(f"no {source}; set XSA_TEST_DATA to a folder that has wikitext2/valid.txt")
    prepare(
        bench.settings(source, reading={"documents": "paragraphs", "unit_bytes": 100_000}, held_out=0.05),
        bench.root / "out",
        Silent(),
    )
    shards = bench.shards("out")
    found = Counter(texts_of(shards, "train")) + Counter(texts_of(shards, "val"))
    lines = source.read_text(encoding="utf-8").split("\n")
    paragraphs: list[list[str]] = [[]]
    for line in lines:
        if line.strip():
            paragraphs[-1].append(line)
        else:
            paragraphs.append([])
    assert found == Counter("\n".join(lines) for lines in paragraphs if lines)
    assert sum(texts_of(shards, "val").count(text) for text in set(texts_of(shards, "val"))) > 20


def test_a_place_that_cannot_be_written_is_an_error_of_one_line(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_json_lines(bench.root / "a.jsonl", make_documents(5))
    with pytest.raises(ValueError, match=r"a\.jsonl: File exists; check the directory"):
        prepare(bench.settings(source), source, Silent())
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: False)  # as for anyone but root
        with pytest.raises(ValueError, match="out: cannot be written to; check the directory"):
            bench.prepare("out", source)


def test_nothing_of_the_preparation_imports_torch() -> None:
    """Each worker starts in a moment and holds little."""
    root = Path(__file__).resolve().parents[4]
    code = "import sys, tasks.text.prepare.job, tasks.text.prepare.worker; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stdout.strip() == "False"
