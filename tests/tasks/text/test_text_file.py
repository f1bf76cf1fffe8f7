import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.errors import UserError
from tasks.text import files
from tasks.text.corpus import file_corpus
from tasks.text.files import check_utf8, write_whole
from tasks.text.loader import TokenWindows

DATA = Path(os.environ.get("XSA_TEST_DATA", Path(__file__).resolve().parents[4] / "shared" / "data"))


def _write(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    return path


@given(st.text(min_size=40, max_size=400), st.floats(0.1, 0.9))
@settings(max_examples=100, deadline=None)
def test_both_splits_are_whole_text_and_together_the_file(
    tmp_path_factory, text: str, fraction: float
) -> None:
    path = _write(tmp_path_factory.mktemp("file"), text.encode("utf-8"))
    corpus = file_corpus(path, fraction)
    train, validation = corpus.train.tobytes(), corpus.validation.tobytes()
    assert train + validation == path.read_bytes()
    assert (train.decode("utf-8") + validation.decode("utf-8")) == text


def test_the_cut_lies_at_the_first_line_end_past_the_wanted_place(tmp_path: Path) -> None:
    corpus = file_corpus(_write(tmp_path, b"12345678\n" * 100), 0.25)
    assert len(corpus.train) == 675  # 675 is wanted, and a line ends there
    corpus = file_corpus(_write(tmp_path, b"12345678\n" * 100), 0.246)
    assert len(corpus.train) == 684  # 679 is wanted
    assert corpus.validation.tobytes().startswith(b"1234")


def test_the_fingerprint_follows_the_text_and_the_split_and_not_the_name(tmp_path: Path) -> None:
    text = "".join(f"line {i}\n" for i in range(200)).encode()
    path = _write(tmp_path, text)
    other = tmp_path / "other.txt"
    other.write_bytes(text)
    changed = tmp_path / "changed.txt"
    changed.write_bytes(text.replace(b"line 7\n", b"line 8\n"))
    same = file_corpus(path).fingerprint
    assert file_corpus(other).fingerprint == same
    assert len({same, file_corpus(path, 0.2).fingerprint, file_corpus(changed).fingerprint}) == 3


@given(st.lists(st.binary(max_size=3) | st.text(max_size=3).map(str.encode), max_size=10).map(b"".join))
@settings(max_examples=200, deadline=None)
def test_invalid_utf8_is_found_at_the_byte_where_python_finds_it(tmp_path_factory, data: bytes) -> None:
    path = _write(tmp_path_factory.mktemp("file"), data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "CHUNK_BYTES", 3)  # characters lie across the ends of chunks
        try:
            data.decode("utf-8")
        except UnicodeDecodeError as error:
            with pytest.raises(UserError, match=f"not UTF-8 at byte {error.start} "):
                check_utf8(path)
        else:
            check_utf8(path)


@pytest.mark.parametrize(
    ("content", "fraction", "message"),
    [
        (b"", 0.1, "the file is empty"),
        (b"abc", 0.1, "3 bytes are too few"),
        (b"fine so far \xff and then not" * 9, 0.1, "not UTF-8 at byte 12 "),
        (b"a text\n" * 9, 0.0, "validation_fraction is 0.0"),
        (b"a text\n" * 9, 1.0, "validation_fraction is 1.0"),
    ],
)
def test_a_file_that_cannot_be_used_is_an_error_of_one_line(
    tmp_path: Path, content: bytes, fraction: float, message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        file_corpus(_write(tmp_path, content), fraction)
    assert "\n" not in str(caught.value)


def test_a_path_that_is_no_file_is_an_error_that_says_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a directory, expected a UTF-8 text file"):
        file_corpus(tmp_path)
    with pytest.raises(UserError, match="no such file"):
        file_corpus(tmp_path / "absent.txt")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = _write(tmp_path, b"old")

    def chunks():
        yield b"new"
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_whole(path, chunks())
    assert [file.name for file in tmp_path.iterdir()] == ["text.txt"]
    assert path.read_bytes() == b"old"
    assert write_whole(path, [b"n", b"ew"]) == files.sha256_of(path)
    assert path.read_bytes() == b"new"


def test_tinyshakespeare_is_read_whole() -> None:
    path = DATA / "tinyshakespeare" / "input.txt"
    if not path.is_file():
        pytest.skip(f"no {path}; set XSA_TEST_DATA to a folder that has tinyshakespeare/input.txt")
    corpus = file_corpus(path)
    assert len(corpus.train) + len(corpus.validation) == path.stat().st_size == 1_115_394
    assert len(corpus.validation) / path.stat().st_size == pytest.approx(0.1, abs=0.001)
    inputs, targets = TokenWindows(corpus.train, 256, 0).next_batch(4)
    assert inputs[:, 1:].equal(targets[:, :-1])
    assert bytes(inputs[0].tolist()) in path.read_bytes()
