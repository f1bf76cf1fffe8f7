"""Checkpoints: whole or absent, the last few kept, and never another run's.

A checkpoint is two files: `step-000200.pt` (torch.save; loaded with weights_only) and, written after it
under its final name, `step-000200.json` with its size and sha256. Without a matching JSON file there is
no checkpoint, so one that was cut short is passed over for the one before it.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tasks.errors import UserError
from xsa_core.files import whole

FORMAT = "xsa-checkpoint"
VERSION = 1
CHUNK = 1 << 22  # bytes hashed at a time


@dataclass(frozen=True)
class Loaded:
    """A checkpoint's content and where it came from."""

    path: Path
    content: dict[str, Any]


def save(directory: Path, step: int, content: dict[str, Any], keep: int) -> Path:
    """Write the checkpoint of `step` whole, then drop all but the last `keep`.

    Raises:
        UserError: the disk is full or not writable; older checkpoints stay as they were.
    """
    path = directory / f"step-{step:08d}.pt"
    content = {"format": FORMAT, "version": VERSION, "step": step, **content}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for left in directory.glob(".step-*.tmp"):
            left.unlink(missing_ok=True)  # of a process that was killed while it wrote
        # A checkpoint of this step may be there already: while its file changes, it does not exist.
        path.with_suffix(".json").unlink(missing_ok=True)
        write_whole(path, lambda temporary: torch.save(content, temporary))
        manifest = {"format": FORMAT, "version": VERSION, "step": step, "bytes": path.stat().st_size}
        text = json.dumps({**manifest, "sha256": sha256(path)}, indent=1)
        write_whole(path.with_suffix(".json"), lambda temporary: temporary.write_text(text))
    except (OSError, RuntimeError) as error:  # RuntimeError is what torch.save makes of a full disk
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise UserError(
            f"{path}: the checkpoint cannot be written ({reason}); make room, then run the same command"
        ) from error
    for old in steps(directory)[:-keep]:
        # The manifest goes first: a checkpoint without one does not exist.
        old.with_suffix(".json").unlink(missing_ok=True)
        old.unlink(missing_ok=True)
    return path


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` write a file under a temporary name, then give it its own."""
    with whole(path) as temporary:
        write(temporary)


def steps(directory: Path) -> list[Path]:
    """Return the checkpoints that claim to exist, oldest first."""
    return sorted(path.with_suffix(".pt") for path in directory.glob("step-*.json"))


def load(path: Path) -> Loaded:
    """Load one checkpoint to CPU memory.

    Raises:
        UserError: missing, truncated, damaged, or not a checkpoint of this suite.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such checkpoint; expected a file step-N.pt of a run directory")
    manifest = read_manifest(path.with_suffix(".json"))
    size = path.stat().st_size
    if manifest and size != manifest["bytes"]:
        raise UserError(
            f"{path}: truncated or changed, {size} bytes instead of {manifest['bytes']}; use another"
        )
    if manifest and sha256(path) != manifest["sha256"]:
        raise UserError(f"{path}: damaged, its sha256 is not the one it was written with; use another")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a file that is not its own
        raise UserError(
            f"{path}: not readable as a checkpoint ({type(error).__name__}); use another"
        ) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(
            f"{path}: not a checkpoint of this suite; expected a file step-N.pt of a run directory"
        )
    if content.get("version") != VERSION:
        raise UserError(
            f"{path}: of checkpoint format {content.get('version')}, this version of the suite reads format "
            f"{VERSION}; use the version that wrote it, or --fresh to start over"
        )
    return Loaded(path, content)


def read_manifest(path: Path) -> dict[str, Any] | None:
    """Return a checkpoint's manifest, None where there is none (a .pt file copied alone).

    Raises:
        UserError: there is one, but it is damaged.
    """
    if not path.exists():
        return None
    try:
        manifest = json.loads(path.read_bytes())
    except (OSError, ValueError):
        manifest = None
    if not isinstance(manifest, dict) or not {"bytes", "sha256"} <= manifest.keys():
        raise UserError(f"{path}: damaged, not the manifest of a checkpoint; use another checkpoint")
    return manifest


def load_latest(directory: Path, config_hash: str, warn: Callable[[str], None]) -> Loaded | None:
    """Return the newest good checkpoint of this very run, None where there is none at all.

    A damaged one is named through `warn` and the one before it is used.

    Raises:
        UserError: there are checkpoints, and not one of them can be used.
    """
    problems = []
    for path in reversed(steps(directory)):
        try:
            loaded = load(path)
            found = loaded.content.get("config_hash")
            if found != config_hash:
                raise UserError(f"{path}: belongs to another config ({found}, this run is {config_hash})")
        except UserError as error:
            problems.append(str(error))
            warn(f"{error}; trying the checkpoint before it")
            continue
        return loaded
    if problems:
        raise UserError(f"no usable checkpoint in {directory}: {problems[0]}; add --fresh to start over")
    return None


def resolve(where: str) -> Path:
    """Return the checkpoint a user means: a file, or the newest of a run directory."""
    path = Path(where)
    if path.is_dir():
        found = steps(path / "checkpoints") or steps(path)
        if not found:
            raise UserError(f"{path}: no checkpoint there; expected a run directory or a file step-N.pt")
        return found[-1]
    return path


def sha256(path: Path) -> str:
    """Return the sha256 of a file, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while chunk := handle.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
