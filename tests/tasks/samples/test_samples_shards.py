"""Shards that webdataset writes are read as webdataset reads them."""

import io
import pickle
import tarfile

import pytest
import webdataset

from tasks.errors import UserError
from tasks.samples.shards import Shards, find_shards


def write(path, samples):
    with webdataset.TarWriter(str(path)) as writer:
        for sample in samples:
            writer.write(sample)


@pytest.fixture
def shard_paths(tmp_path):
    samples = [
        {"__key__": f"a/{i:03d}", "txt": f"text {i}", "cls": i % 3, "seg.png": bytes([i])} for i in range(7)
    ]
    write(tmp_path / "set-0.tar", samples[:4])
    write(tmp_path / "set-1.tar", samples[4:])
    return find_shards(tmp_path, "set-*.tar")


def test_samples_equal_those_of_webdataset(shard_paths):
    theirs = list(webdataset.WebDataset([str(path) for path in shard_paths], shardshuffle=False))
    shards = Shards(shard_paths)
    assert len(shards) == len(theirs) == 7
    for index, sample in enumerate(theirs):
        assert shards.names[index].endswith(f":{sample['__key__']}")
        assert shards.read(index) == {name: value for name, value in sample.items() if name[0] != "_"}


def test_a_pickled_copy_reads_the_same(shard_paths):
    shards = Shards(shard_paths)
    shards.read(0)
    assert pickle.loads(pickle.dumps(shards)).read(5) == shards.read(5)


def test_the_fingerprint_follows_the_content(shard_paths, monkeypatch):
    before = Shards(shard_paths).fingerprint
    assert Shards(shard_paths).fingerprint == before
    data = bytearray(shard_paths[1].read_bytes())
    data[data.index(b"text 5")] ^= 1
    shard_paths[1].write_bytes(data)
    assert Shards(shard_paths).fingerprint != before
    monkeypatch.setattr("tasks.samples.shards.WHOLE_BYTES", 0)
    assert Shards(shard_paths).fingerprint != Shards(shard_paths[:1]).fingerprint


@pytest.mark.parametrize("keep", [100, 700, 5000])
def test_a_shard_cut_short_is_refused_by_name(shard_paths, keep):
    shard_paths[1].write_bytes(shard_paths[1].read_bytes()[:keep])
    with pytest.raises(UserError, match=r"set-1\.tar: not a whole tar file"):
        Shards(shard_paths)


def test_what_is_no_shard_is_refused_by_name(tmp_path):
    (tmp_path / "x.tar").write_bytes(b"no tar file" * 100)
    with pytest.raises(UserError, match=r"x\.tar: not a whole tar file"):
        Shards([tmp_path / "x.tar"])
    with pytest.raises(UserError, match=r"no shards named \*\.tar"):
        find_shards(tmp_path / "absent", "*.tar")
    with tarfile.open(tmp_path / "empty.tar", "w"):
        pass
    with pytest.raises(UserError, match="no samples in 1 shards"):
        Shards([tmp_path / "empty.tar"])


def test_files_of_a_sample_that_lie_apart_are_refused(tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        for name in ("a.txt", "b.txt", "a.cls"):
            archive.addfile(tarfile.TarInfo(name), io.BytesIO())
    with pytest.raises(UserError, match="files of sample a are not neighbours"):
        Shards([tmp_path / "x.tar"])
