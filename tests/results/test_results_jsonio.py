"""JSON text: exact floats, explicit NaN and infinity, stable order, whole files."""

import json
import math
import os
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from results.jsonio import dumps, loads, plain, write_whole

leaves = st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.floats()
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=6).filter(lambda key: key != "$float"), inner, max_size=4)
    ),
    max_leaves=12,
)


def same(first: object, second: object) -> bool:
    """Compare bit by bit: type, sign of zero, and any NaN equal to any NaN."""
    if type(first) is not type(second):
        return False
    if isinstance(first, float) and isinstance(second, float):
        if math.isnan(first) or math.isnan(second):
            return math.isnan(first) and math.isnan(second)
        return struct.pack("d", first) == struct.pack("d", second)
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, dict) and isinstance(second, dict):
        return list(first) == list(second) and all(same(first[key], second[key]) for key in first)
    return first == second


@settings(max_examples=150, deadline=None)
@given(trees)
def test_reading_gives_back_what_was_written_bit_by_bit(tree):
    tree = plain(tree)
    assert same(loads(dumps(tree)), tree)


@settings(max_examples=60, deadline=None)
@given(trees)
def test_any_json_reader_can_open_the_text(tree):
    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    json.loads(dumps(plain(tree)), parse_constant=refuse)


def test_equal_contents_give_equal_text_whatever_the_order():
    assert dumps(plain({"b": 1, "a": (1.5, {"y": 0, "x": 1})})) == dumps(
        plain({"a": [1.5, {"x": 1, "y": 0}], "b": 1})
    )


def test_lists_of_numbers_stay_on_one_line():
    assert '"loss": [1.5, 2.5]' in dumps({"loss": [1.5, 2.5]})


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"a": 1, "a": 2}', "twice"),
        ('{"a": NaN}', "not JSON"),
        ('{"a": -Infinity}', "not JSON"),
        ('{"$float": "zero"}', "must stand alone"),
        ('{"$float": "nan", "b": 1}', "must stand alone"),
        ('{"a": 1', "delimiter"),
        ("[" * 100_000, "deep"),
    ],
)
def test_ambiguous_or_broken_text_is_refused(text, complaint):
    with pytest.raises(ValueError, match=complaint):
        loads(text)


@pytest.mark.parametrize("value", [{1: "a"}, {"a": {2.0}}, {"a": Path("x")}, {"$float": "nan"}, object()])
def test_what_has_no_json_form_is_refused(value):
    with pytest.raises(ValueError, match=r"JSON form|expected str|NaN and infinity"):
        plain(value)


def test_self_containing_data_is_refused_not_followed_forever():
    loop: dict[str, object] = {}
    loop["self"] = loop
    with pytest.raises(ValueError, match="nested deeper"):
        plain(loop)


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_failed_write_leaves_the_old_file_and_no_rest(tmp_path, monkeypatch, step):
    path = tmp_path / "record.json"
    write_whole(path, b"old")

    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    if step == "fsync":
        monkeypatch.setattr(os, "fsync", full)
    else:
        monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, b"new")
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["record.json"]


def test_reader_sees_the_old_or_the_new_file_and_nothing_between(tmp_path, monkeypatch):
    path = tmp_path / "record.json"
    write_whole(path, b"old" * 1000)
    seen = []
    real = os.fsync

    def watching(descriptor):
        seen.append(path.read_bytes())
        real(descriptor)

    monkeypatch.setattr(os, "fsync", watching)
    write_whole(path, b"new")
    assert seen[0] == b"old" * 1000
    assert path.read_bytes() == b"new"
