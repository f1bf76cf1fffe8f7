"""Sharded checkpoints on disk: whole or absent, compared with their digests, read without running code."""

import errno
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tasks.errors import UserError
from tasks.runner import checkpoint, shards

HASH = "0123456789abcdef"


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    """A process group of this process alone: shards are then whole, the way to the disk is the same."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def content(mesh: DeviceMesh, seed: int) -> dict[str, Any]:
    """Return what a run would save: tied weights, state of an optimizer, plain values."""
    torch.manual_seed(seed)
    tied = distribute_tensor(torch.randn(5, 3), mesh, [Shard(0)])
    momentum = distribute_tensor(torch.randn(5, 3), mesh, [Shard(0)])
    return {
        "model": {"in.weight": tied, "out.weight": tied, "buffer": torch.arange(3)},
        "optimizer": {
            "state": {0: {"momentum_buffer": momentum, "step": torch.tensor(2.0)}},
            "param_groups": [{"lr": 0.1, "params": [0]}],
        },
        "config_hash": HASH,
    }


@pytest.fixture
def folder(mesh: DeviceMesh, tmp_path: Path) -> Path:
    """Checkpoints of three steps."""
    for step in (10, 20, 30):
        checkpoint.save(tmp_path / "checkpoints", step, content(mesh, step), keep=3)
    return tmp_path / "checkpoints"


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def test_what_was_saved_comes_back_whole(folder: Path, mesh: DeviceMesh) -> None:
    path = checkpoint.steps(folder)[-1]
    assert path.name == "step-00000030.dcp"
    got, want = checkpoint.load(path).content, plain(content(mesh, 30))
    assert got["step"] == 30
    for part in ("model", "optimizer"):
        assert got[part].keys() == want[part].keys()
    for name, tensor in want["model"].items():
        assert torch.equal(got["model"][name], tensor)
    state = got["optimizer"]["state"][0]
    assert torch.equal(state["momentum_buffer"], want["optimizer"]["state"][0]["momentum_buffer"])
    assert state["step"] == 2
    assert got["optimizer"]["param_groups"] == want["optimizer"]["param_groups"]
    # A tied weight lies on the disk once.
    index = shards.Reader(path).read_metadata()
    assert set(index.state_dict_metadata) == {"model/in.weight", "optimizer/state/0/momentum_buffer"}


def test_places_are_filled_and_shards_stay_shards(folder: Path, mesh: DeviceMesh) -> None:
    loaded = checkpoint.load(checkpoint.steps(folder)[-1], whole=False)
    assert "in.weight" not in loaded.content["model"]

    def place(name: str, size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        return distribute_tensor(torch.zeros(size, dtype=dtype), mesh, [Shard(0)])

    found = checkpoint.with_shards(loaded, place).content["model"]
    want = content(mesh, 30)["model"]["in.weight"].full_tensor()
    assert found["in.weight"].placements == (Shard(0),)
    assert found["out.weight"] is found["in.weight"]
    assert torch.equal(found["in.weight"].full_tensor(), want)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "rest.pt"])
@pytest.mark.parametrize("harm", ["truncated", "changed", "missing"])
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_taken(
    folder: Path, name: str, harm: str
) -> None:
    file = checkpoint.steps(folder)[-1] / name
    data = file.read_bytes()
    if harm == "missing":
        file.unlink()
    else:
        middle = len(data) // 2
        changed = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        file.write_bytes(data[:middle] if harm == "truncated" else changed)
    warnings: list[str] = []
    loaded = checkpoint.load_latest(folder, HASH, warnings.append)
    assert loaded is not None
    assert loaded.content["step"] == 20
    (line,) = warnings
    assert "step-00000030.dcp" in line


class Harmful:
    """What a pickle may do to who reads it."""

    def __reduce__(self) -> tuple:
        return (Path.touch, (Path("harm"),))


@pytest.mark.parametrize("index", [Harmful(), {"state_dict_metadata": Harmful()}, [1, 2], torch.Size([3])])
def test_an_index_that_is_none_runs_nothing(
    folder: Path, index: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its digest is right, as whoever made it would see to."""
    monkeypatch.chdir(tmp_path)
    path = checkpoint.steps(folder)[-1]
    (path / ".metadata").write_bytes(pickle.dumps(index))
    manifest = json.loads(path.with_suffix(".json").read_text())
    manifest["files"][".metadata"] = checkpoint.facts_of(path / ".metadata")
    path.with_suffix(".json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="not readable as a checkpoint"):
        checkpoint.load(path)
    with pytest.raises(UserError, match="shards cannot be read"):
        checkpoint.with_shards(checkpoint.load(path, whole=False))
    assert not (tmp_path / "harm").exists()


def test_a_checkpoint_cut_short_does_not_exist_and_is_cleared_away(folder: Path, mesh: DeviceMesh) -> None:
    """Killed while the shards were written, and killed before the manifest was."""
    half = folder / ".step-00000040.dcp.tmp"
    half.mkdir()
    (half / "__0_0.distcp").write_bytes(b"half")
    nameless = folder / "step-00000050.dcp"
    nameless.mkdir()
    assert [path.name for path in checkpoint.steps(folder)][-1] == "step-00000030.dcp"
    checkpoint.save(folder, 50, content(mesh, 50), keep=2)
    assert not half.exists()
    assert [path.name for path in checkpoint.steps(folder)] == ["step-00000030.dcp", "step-00000050.dcp"]
    assert checkpoint.load(nameless).content["step"] == 50


def test_a_full_disk_leaves_the_older_checkpoints(
    folder: Path, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(directory: Path, tensors: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shards, "write", full)
    with pytest.raises(UserError, match=r"step-00000040\.dcp.*No space left on device.*make room"):
        checkpoint.save(folder, 40, content(mesh, 40), keep=1)
    assert [path.name for path in checkpoint.steps(folder)] == [f"step-000000{n}.dcp" for n in (10, 20, 30)]


def test_a_step_saved_by_one_process_and_by_shards_is_there_once(folder: Path, mesh: DeviceMesh) -> None:
    checkpoint.save(folder, 30, plain(content(mesh, 7)), keep=3)
    path = checkpoint.steps(folder)[-1]
    assert path.name == "step-00000030.pt"
    assert not (folder / "step-00000030.dcp").exists()
    checkpoint.save(folder, 30, content(mesh, 8), keep=3)
    assert checkpoint.steps(folder)[-1].name == "step-00000030.dcp"
    assert not path.exists()
