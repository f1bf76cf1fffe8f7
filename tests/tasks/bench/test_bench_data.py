"""The benchmark of text preparation compares the same work: both ways write the same tokens."""

import random

import numpy as np
import pytest

from tasks.bench import data
from tasks.bench.data import documents, measure, same_tokens
from tasks.text.shards import write_shard

WORDS = ("the", "value", "of", "an", "attention", "head", "is", "removed", "from", "its", "öwn", "output\n")


@pytest.fixture(scope="module")
def text() -> bytes:
    return " ".join(random.Random(0).choices(WORDS, k=40_000)).encode("utf-8")


def test_documents_are_of_the_asked_size_and_seeded(text: bytes) -> None:
    found = list(documents(text, 400_000))
    size = sum(len(document.encode("utf-8")) for document in found)
    assert size + 4 * len(found) >= 400_000  # a cut inside a character loses its bytes
    assert size < 400_000 + data.LONGEST
    assert found == list(documents(text, 400_000))
    assert found != list(documents(text, 400_000, seed=1))


def test_equal_tokens_are_told_from_others(tmp_path) -> None:
    end = 50256
    np.array([1, 2, end, 3, end], "<u2").tofile(tmp_path / "nanogpt")
    others = {"same": [end, 1, 2, end, 3], "other": [end, 1, 4, end, 3], "short": [end, 1, 2]}
    for name, tokens in others.items():
        (tmp_path / name).mkdir()
        write_shard(tmp_path / name / "train_000000.bin", np.array(tokens))
        assert same_tokens(tmp_path / "nanogpt", tmp_path / name) == (name == "same")


def test_both_ways_are_measured_on_the_same_tokens(text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    rows = measure(text, 1, 1, 1)  # raises where the tokens differ
    by_way = {row["way"]: row for row in rows}
    assert list(by_way) == ["nanoGPT", "suite", "datasets.map alone"]
    assert by_way["nanoGPT"]["speed_ratio"] == 1.0
    # nanoGPT's way holds `datasets.map` within it.
    assert by_way["datasets.map alone"]["megabytes_per_second"] > by_way["nanoGPT"]["megabytes_per_second"]
    for row in rows:
        assert row["ratio_low"] <= row["speed_ratio"] <= row["ratio_high"]
        assert row["megabytes"] == pytest.approx(1.0, rel=0.1)
