"""Checkpoints are whole or absent, belong to their run, and the good one before a bad one is used."""

import errno
import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.errors import UserError
from tasks.runner import checkpoint

HASH = "0123456789abcdef"


def content(step: int) -> dict[str, Any]:
    """Return state of 400 kB, different at every step."""
    generator = torch.Generator().manual_seed(step)
    weights = torch.randn(100_000, generator=generator)
    return {"config_hash": HASH, "model": {"w": weights}, "rates": [1.5, 2.5], "name": None}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the checkpoints of steps 10, 20 and 30."""
    for step in (10, 20, 30):
        checkpoint.save(tmp_path, step, content(step), keep=3)
    return tmp_path


def last(folder: Path) -> Path:
    return folder / "step-00000030.pt"


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def delete(path: Path) -> None:
    path.unlink()


def sign(path: Path) -> None:
    """Write the manifest that belongs to the file as it is: damage alone must not be what is refused."""
    manifest = {"bytes": path.stat().st_size, "sha256": checkpoint.sha256(path)}
    path.with_suffix(".json").write_text(json.dumps(manifest))


def foreign_tensor(path: Path) -> None:
    torch.save({"weights": torch.zeros(3)}, path)
    sign(path)


def foreign_pickle(path: Path) -> None:
    """A pickle that would run code: loading must refuse it, not run it."""

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(path.with_name("evil")),)

    torch.save({"format": checkpoint.FORMAT, "version": 1, "x": Evil()}, path)
    sign(path)


def foreign_text(path: Path) -> None:
    path.write_text("not a checkpoint at all")
    sign(path)


def newer(path: Path) -> None:
    torch.save({"format": checkpoint.FORMAT, "version": checkpoint.VERSION + 1, **content(30)}, path)
    sign(path)


def no_version(path: Path) -> None:
    torch.save({"format": checkpoint.FORMAT, **content(30)}, path)
    sign(path)


def other_config(path: Path) -> None:
    torch.save({"format": checkpoint.FORMAT, "version": 1, **content(30), "config_hash": "f" * 16}, path)
    sign(path)


def bad_manifest(path: Path) -> None:
    path.with_suffix(".json").write_text('{"bytes": 12')


def listed_manifest(path: Path) -> None:
    path.with_suffix(".json").write_text("[1, 2]")


def binary_manifest(path: Path) -> None:
    path.with_suffix(".json").write_bytes(b"\xff\xfe\x00")


DAMAGE: dict[Callable[[Path], None], str] = {
    truncate: "truncated or changed",
    empty: "truncated or changed, 0 bytes instead of",
    flip: "damaged, its sha256",
    delete: "no such checkpoint",
    foreign_tensor: "not a checkpoint of this suite",
    foreign_pickle: "not readable as a checkpoint",
    foreign_text: "not readable as a checkpoint",
    newer: f"of checkpoint format {checkpoint.VERSION + 1}",
    no_version: "of checkpoint format None",
    other_config: f"belongs to another config (ffffffffffffffff, this run is {HASH})",
    bad_manifest: "damaged, not the manifest",
    listed_manifest: "damaged, not the manifest",
    binary_manifest: "damaged, not the manifest",
}
KINDS = pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)


def test_content_comes_back_bit_for_bit(folder: Path) -> None:
    loaded = checkpoint.load(last(folder))
    assert torch.equal(loaded.content["model"]["w"], content(30)["model"]["w"])
    assert (loaded.content["step"], loaded.content["rates"], loaded.content["name"]) == (30, [1.5, 2.5], None)


@KINDS
def test_a_bad_checkpoint_is_named_in_one_line_and_the_one_before_it_used(
    folder: Path, damage: Callable
) -> None:
    damage(last(folder))
    warnings: list[str] = []
    loaded = checkpoint.load_latest(folder, HASH, warnings.append)
    assert loaded.content["step"] == 20
    assert torch.equal(loaded.content["model"]["w"], content(20)["model"]["w"])
    (line,) = warnings
    assert "\n" not in line
    assert "step-00000030" in line
    assert DAMAGE[damage] in line
    assert line.endswith("trying the checkpoint before it")
    assert not (folder / "evil").exists()


@KINDS
def test_no_good_checkpoint_is_an_error_that_offers_a_way_out(folder: Path, damage: Callable) -> None:
    for path in checkpoint.steps(folder):
        damage(path)
    with pytest.raises(UserError, match="no usable checkpoint") as raised:
        checkpoint.load_latest(folder, HASH, lambda line: None)
    assert "--fresh" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_no_checkpoint_at_all_is_not_an_error(tmp_path: Path) -> None:
    assert checkpoint.load_latest(tmp_path / "none", HASH, lambda line: None) is None


def test_a_file_without_manifest_is_no_checkpoint_of_the_run(folder: Path) -> None:
    last(folder).with_suffix(".json").unlink()
    warnings: list[str] = []
    assert checkpoint.load_latest(folder, HASH, warnings.append).content["step"] == 20
    assert warnings == []


def test_a_file_copied_alone_can_be_loaded_by_name(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copied.pt"
    shutil.copy(last(folder), copy)
    assert checkpoint.load(copy).content["step"] == 30


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_last_k_are_kept(tmp_path: Path, keep: int) -> None:
    for step in (5, 10, 15, 100, 2000):
        checkpoint.save(tmp_path, step, content(step), keep)
    kept = (5, 10, 15, 100, 2000)[-keep:]
    assert [path.name for path in checkpoint.steps(tmp_path)] == [f"step-{step:08d}.pt" for step in kept]
    assert len(list(tmp_path.iterdir())) == 2 * keep


def test_saving_a_step_again_replaces_it(folder: Path) -> None:
    checkpoint.save(folder, 30, {**content(7), "config_hash": HASH}, keep=3)
    assert torch.equal(checkpoint.load(last(folder)).content["model"]["w"], content(7)["model"]["w"])
    assert len(checkpoint.steps(folder)) == 3


def test_what_a_killed_writer_left_is_cleared_away(folder: Path) -> None:
    (folder / ".step-00000040.pt.123.tmp").write_bytes(b"half")
    checkpoint.save(folder, 40, content(40), keep=2)
    assert sorted(path.name for path in folder.iterdir()) == [
        f"step-{step:08d}.{kind}" for step in (30, 40) for kind in ("json", "pt")
    ]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def fail_sync(patch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    patch.setattr(os, "fsync", full)


def fail_rename(patch: pytest.MonkeyPatch) -> None:
    def full(self: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    patch.setattr(Path, "replace", full)


def fail_manifest(patch: pytest.MonkeyPatch) -> None:
    def full(self: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    patch.setattr(Path, "write_text", full)


@pytest.mark.parametrize("failure", [fail_sync, fail_rename, fail_manifest])
def test_a_failing_write_leaves_the_older_ones_intact(
    folder: Path, monkeypatch: pytest.MonkeyPatch, failure: Callable
) -> None:
    before = files(folder)
    with monkeypatch.context() as patch:
        failure(patch)
        with pytest.raises(UserError, match="cannot be written") as raised:
            checkpoint.save(folder, 40, content(40), keep=2)
    assert "No space left on device" in str(raised.value)
    assert "\n" not in str(raised.value)
    after = files(folder)
    assert {name: after.get(name) for name in before} == before
    assert not [name for name in after if name.endswith(".tmp")]
    assert checkpoint.load_latest(folder, HASH, pytest.fail).content["step"] == 30


def test_a_real_limit_of_the_system_leaves_no_half_file(folder: Path) -> None:
    """The kernel itself refuses the write here, in the middle of torch's own C++ writer."""
    before = files(folder)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(UserError, match="cannot be written") as raised:
            checkpoint.save(folder, 40, content(40), keep=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(raised.value)
    assert files(folder) == before


def test_a_full_disk_ends_a_run_in_one_line_and_the_run_goes_on_later(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        write = checkpoint.write_whole

        def full(path: Path, content: Callable) -> None:
            if path.name.startswith("step-00000004"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            write(path, content)

        patch.setattr(checkpoint, "write_whole", full)
        with pytest.raises(UserError, match=r"step-00000004\.pt: the checkpoint cannot be written"):
            lab.train("loop.checkpoint_every=2")
    (record,) = (lab.root / "records").iterdir()
    assert '"failed"' in record.read_text()
    outcome = lab.train("loop.checkpoint_every=2")
    assert outcome.record.status == "completed"
    whole = lab.at("whole").train("loop.checkpoint_every=2")
    assert outcome.record.metrics == whole.record.metrics


def test_resolve_takes_a_run_directory_its_folder_or_a_file(tmp_path: Path) -> None:
    inner = tmp_path / "checkpoints"
    for step in (10, 20):
        checkpoint.save(inner, step, content(step), keep=3)
    want = inner / "step-00000020.pt"
    assert checkpoint.resolve(str(tmp_path)) == checkpoint.resolve(str(inner)) == want
    assert checkpoint.resolve(str(want)) == want
    (tmp_path / "other").mkdir()
    with pytest.raises(UserError, match="no checkpoint there"):
        checkpoint.resolve(str(tmp_path / "other"))
