"""A process that dies while it writes: at any byte, what was whole before stays whole."""

import itertools
import os
import random
import resource
import signal
import time
from pathlib import Path

import pytest
import torch

from results.store import load_records, read_record, write_record
from tasks.runner import checkpoint

HASH = "0123456789abcdef"


def content(step: int) -> dict:
    """What a checkpoint of `step` holds: about 200 kB that no other step has."""
    generator = torch.Generator().manual_seed(step)
    return {"config_hash": HASH, "model": {"weight": torch.randn(50_000, generator=generator)}}


def is_whole(loaded: checkpoint.Loaded) -> bool:
    """Hold that a checkpoint is what its step was saved with."""
    return torch.equal(loaded.content["model"]["weight"], content(loaded.content["step"])["model"]["weight"])


def warnings_of(folder: Path) -> tuple[checkpoint.Loaded | None, list[str]]:
    told: list[str] = []
    return checkpoint.load_latest(folder, HASH, told.append), told


def die_at(size: int) -> None:
    """Let the system end this process when a file of it grows beyond `size` bytes, amid a write."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it; by default it ends the process
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def save_until(folder: Path, step: int, size: int) -> None:
    die_at(size)
    checkpoint.save(folder, step, content(step), keep=2)


def test_a_death_at_any_byte_of_a_checkpoint_leaves_the_one_before(fork, tmp_path):
    folder = tmp_path / "checkpoints"
    whole = checkpoint.save(folder, 1, content(1), keep=2).stat().st_size
    # The first and last bytes, a page and its neighbours, and places between.
    places = [0, 1, 63, 4095, 4096, 4097, *range(20_000, whole, 40_000), whole - 1]
    for size in places:
        child = fork(save_until, folder, 2, size)
        assert child.wait() == -signal.SIGXFSZ, child.text()
        loaded, told = warnings_of(folder)
        assert (loaded.content["step"], told) == (1, [])
        assert is_whole(loaded)
    checkpoint.save(folder, 2, content(2), keep=2)
    assert is_whole(warnings_of(folder)[0])
    names = {path.name for path in folder.iterdir()}
    assert names == {f"step-0000000{step}.{end}" for step in (1, 2) for end in ("pt", "json")}


def test_a_death_while_a_checkpoint_is_replaced_loses_no_other(fork, tmp_path):
    for step in (1, 2):
        checkpoint.save(tmp_path, step, content(step), keep=2)
    assert fork(save_until, tmp_path, 2, 100_000).wait() == -signal.SIGXFSZ
    loaded, _ = warnings_of(tmp_path)
    assert loaded.content["step"] == 1
    assert is_whole(loaded)


def save_for_ever(folder: Path, first: int, told: int) -> None:
    """Save step after step, and tell each when it is safe."""
    for step in itertools.count(first):
        checkpoint.save(folder, step, content(step), keep=2)
        os.write(told, f"{step}\n".encode())


def test_sigkill_at_any_moment_leaves_every_checkpoint_that_was_reported(fork, tmp_path):
    folder, draw, newest = tmp_path / "checkpoints", random.Random(3), 0
    for _ in range(12):
        reader, writer = os.pipe()
        child = fork(save_for_ever, folder, newest + 1, writer)
        os.close(writer)
        # The first report, then a moment that may lie anywhere in the writing of a later one.
        said = os.read(reader, 100)
        time.sleep(draw.uniform(0.0, 0.03))
        child.kill()
        assert child.wait() == -signal.SIGKILL
        while more := os.read(reader, 1 << 16):
            said += more
        os.close(reader)
        loaded, told = warnings_of(folder)
        assert told == []
        reported = max(int(word) for word in said.split())
        assert loaded.content["step"] >= reported > newest
        assert is_whole(loaded)
        newest = loaded.content["step"]
    assert (
        len(list(folder.glob(".*.tmp"))) <= 1
    )  # of the last one killed; each writer clears its forerunner's


@pytest.fixture(scope="module")
def record(make_lab, tmp_path_factory):
    """The record of a real, very small run."""
    return make_lab(tmp_path_factory.mktemp("template")).train("loop.max_steps=2").record


def replace_record(record, folder: Path, size: int) -> None:
    die_at(size)
    write_record(record.updated(status="failed", reason="a later attempt", sample="x" * 10_000), folder)


def test_a_death_at_any_byte_of_a_record_leaves_the_finished_one(fork, tmp_path, record):
    path = write_record(record, tmp_path)
    before = path.read_bytes()
    for size in [0, 1, 100, 1000, 4096, len(before) + 5000]:
        assert fork(replace_record, record, tmp_path, size).wait() == -signal.SIGXFSZ
        assert path.read_bytes() == before
        assert load_records(tmp_path) == [record]
    write_record(record.updated(reason="again"), tmp_path)
    assert read_record(path).reason == "again"
