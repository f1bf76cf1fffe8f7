import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.text.loader import TokenWindows
from tasks.text.shards import TokenShards, open_shard, write_shard


def test_a_shard_has_the_layout_of_llm_c(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    write_shard(path, np.array([1, 65535, 7]))
    assert path.read_bytes() == struct.pack("<256i3H", 20240520, 1, 3, *[0] * 253, 1, 65535, 7)
    assert open_shard(path).tolist() == [1, 65535, 7]


def test_headerless_files_are_read_on_request_alone(tmp_path: Path) -> None:
    path = tmp_path / "nanogpt.bin"
    path.write_bytes(struct.pack("<4H", 5, 6, 7, 8))
    assert open_shard(path, headerless=True).tolist() == [5, 6, 7, 8]
    with pytest.raises(ValueError, match=r"nanogpt\.bin: no token shard.*headerless"):
        open_shard(path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1], "1029 bytes, expected 1030"),
        (lambda data: data + b"xx", "1032 bytes, expected 1030"),
        (lambda data: b"\0" + data[1:], "no token shard"),
        (lambda data: data[:4] + b"\2" + data[5:], "shard version 2, expected 1"),
        (lambda data: data[:6], "no token shard"),
        (lambda data: data[:8] + bytes(4) + data[12:1024], "no tokens in it"),
        (lambda data: data[:8] + b"\xff" * 4 + data[12:], "damaged"),
    ],
)
def test_a_damaged_shard_is_refused_by_name(tmp_path: Path, damage, message: str) -> None:
    path = tmp_path / "broken.bin"
    write_shard(path, np.array([1, 2, 3]))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=message) as caught:
        open_shard(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_absent_shard_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent\.bin"):
        TokenShards([tmp_path / "absent.bin"])
    with pytest.raises(ValueError, match="no token shards"):
        TokenShards([])


def test_ids_that_do_not_fit_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected 0 to 65535"):
        write_shard(tmp_path / "a.bin", np.array([0, 65536]))
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], np.ndarray]:
    directory = tmp_path_factory.mktemp("shards")
    tokens = np.random.default_rng(0).integers(0, 1 << 16, 100)
    paths = [directory / f"{i}.bin" for i in range(4)]
    for path, part in zip(paths, np.split(tokens, [1, 40, 41]), strict=True):
        write_shard(path, part)
    return paths, tokens


@given(st.integers(-120, 120) | st.none(), st.integers(-120, 120) | st.none())
@settings(max_examples=200, deadline=None)
def test_slices_across_shards_equal_slices_of_their_concatenation(shards, start, stop) -> None:
    paths, tokens = shards
    np.testing.assert_array_equal(TokenShards(paths)[start:stop], tokens[start:stop])


def test_windows_over_shards_equal_windows_over_one_array(shards) -> None:
    paths, tokens = shards
    over_shards, over_array = TokenWindows(TokenShards(paths), 9, 1), TokenWindows(tokens, 9, 1)
    for _ in range(8):
        for a, b in zip(over_shards.next_batch(3), over_array.next_batch(3), strict=True):
            assert a.equal(b)
