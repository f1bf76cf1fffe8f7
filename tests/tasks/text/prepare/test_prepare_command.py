"""`./xsa data` as a user meets it: what it prints, how it exits."""

from pathlib import Path

import pytest
from prepare_bench import Bench, make_documents, write_json_lines

from tasks.runner.cli import main

pytestmark = pytest.mark.usefixtures("inline")


@pytest.fixture
def made(bench: Bench, capsys: pytest.CaptureFixture) -> tuple[Path, str]:
    """A set made by the command, and what it printed."""
    source = write_json_lines(bench.root / "a.jsonl", [*make_documents(50), " "])
    out = bench.root / "out"
    options = ["--tokenizer", "bytes", "--held-out", "0.2", "--shard-tokens", "3000", "--workers", "1"]
    assert main(["data", "prepare", str(source), "--out", str(out), *options]) == 0
    return out, capsys.readouterr().out


def test_prepare_prints_progress_counts_and_what_was_skipped(made: tuple[Path, str]) -> None:
    out, text = made
    assert "looking at files: 1/1" in text
    assert "MB/s" in text
    assert "1 documents were skipped (empty 1)" in text
    assert "a.jsonl, byte " in text
    assert f"{out}: ready" in text.replace("\n", "")


def test_verify_passes_what_was_made_and_names_what_is_damaged(
    made: tuple[Path, str], capsys: pytest.CaptureFixture
) -> None:
    out, _ = made
    assert main(["data", "verify", str(out)]) == 0
    assert "every shard is what the manifest says" in capsys.readouterr().out
    shard = out / "train_000001.bin"
    data = shard.read_bytes()
    shard.write_bytes(data[:-2] + bytes([data[-2] ^ 1, data[-1]]))
    assert main(["data", "verify", str(out), "--quick"]) == 0  # sizes are right
    capsys.readouterr()
    assert main(["data", "verify", str(out)]) == 1
    text = capsys.readouterr().out
    assert f"{shard}: its content is not what the manifest says" in text
    assert "1 problem;" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["prepare", "x.jsonl"], "no --out"),
        (["prepare", "--out", "DIR"], "no source"),
        (["prepare", "absent.jsonl", "--out", "DIR"], "absent.jsonl: no such file"),
        (["verify"], "expected one directory"),
        (["verify", "absent"], "absent: no such directory"),
        (["clean"], "invalid choice"),
        (["prepare", "x", "--out", "DIR", "--held-out", "many"], "--held-out"),
    ],
)
def test_mistakes_are_one_line_and_status_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["data", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "DIR").exists()
