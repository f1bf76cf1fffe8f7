"""Checkpoints: whole or absent, the last few kept, and never another run's.

A checkpoint is two files: `step-000200.pt` (torch.save; loaded with weights_only) and, written after it
under its final name, `step-000200.json` with its size and sha256. Without a matching JSON file there is
no checkpoint, so one that was cut short is passed over for the one before it. Of a sharded run the first is a
directory, `step-000200.dcp`, with a file of each process (see `shards`) and `rest.pt`; it is written under a
temporary name, and its JSON file has size and sha256 of each of its files.
"""

import contextlib
import hashlib
import json
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from tasks.errors import UserError
from tasks.runner import distributed, shards
from tasks.runner.disk import facts_of, remove, sha256, sync
from tasks.runner.distributed import Ranks
from xsa_core.files import whole

FORMAT = "xsa-checkpoint"
VERSION = 1
ALONE = Ranks()
REST = "rest.pt"  # what of a sharded checkpoint is not sharded


@dataclass(frozen=True)
class Loaded:
    """A checkpoint's content and where it came from."""

    path: Path
    content: dict[str, Any]


def save(directory: Path, step: int, content: dict[str, Any], keep: int, ranks: Ranks = ALONE) -> Path:
    """Write the checkpoint of `step` whole, then drop all but the last `keep`; on all ranks at once.

    Raises:
        UserError: the disk is full or not writable; older checkpoints stay as they were.
    """
    content = {"format": FORMAT, "version": VERSION, "step": step, **content}
    sharded = shards.has_shards(content)
    path = directory / f"step-{step:08d}{'.dcp' if sharded else '.pt'}"
    temporary = directory / f".{path.name}.tmp"

    def begin() -> None:
        directory.mkdir(parents=True, exist_ok=True)
        for left in directory.glob(".step-*.tmp"):
            remove(left)  # of a process that was killed while it wrote
        # A checkpoint of this step may be there already: while its files change, it does not exist.
        path.with_suffix(".json").unlink(missing_ok=True)
        for same in (path.with_suffix(".pt"), path.with_suffix(".dcp")):
            if same != path or sharded:
                remove(same)

    def write_file() -> None:
        write_whole(path, lambda file: torch.save(content, file))
        facts = {"bytes": path.stat().st_size, "sha256": sha256(path)}
        write_manifest(path, step, facts)

    def finish_directory(files: dict[str, dict[str, Any]], rest: dict[str, Any]) -> None:
        write_whole(temporary / REST, lambda file: torch.save(rest, file))
        files |= {name: facts_of(temporary / name) for name in (REST, ".metadata")}
        sync(temporary)
        temporary.rename(path)
        sync(directory)
        text = json.dumps(files, sort_keys=True)
        whole = {"bytes": sum(each["bytes"] for each in files.values()), "files": files}
        write_manifest(path, step, {**whole, "sha256": hashlib.sha256(text.encode()).hexdigest()})

    decide(path, begin, ranks)
    if not sharded:
        decide(path, write_file, ranks)
    else:
        tensors, rest = shards.taken_apart(content)
        with written(path):
            shards.write(temporary, tensors)
            # Each rank hashes what it wrote.
            own = {file.name: facts_of(file) for file in temporary.glob(f"__{ranks.rank}_*")}
        parts = distributed.gather(own, ranks) or []
        files = {name: facts for part in parts for name, facts in part.items()}
        decide(path, lambda: finish_directory(files, rest), ranks)
    if ranks.is_first:
        for old in steps(directory)[:-keep]:
            drop(old)
    return path


@contextlib.contextmanager
def written(path: Path) -> Iterator[None]:
    """Turn what goes wrong in writing into the user's line."""
    try:
        yield
    except (OSError, RuntimeError, CheckpointException) as error:
        # RuntimeError is what torch.save makes of a full disk.
        if isinstance(error, CheckpointException):
            error = next(iter(error.failures.values()))[0]
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise UserError(
            f"{path}: the checkpoint cannot be written ({reason}); make room, then run the same command"
        ) from error


def decide(path: Path, work: Callable[[], None], ranks: Ranks) -> None:
    """Do a piece of writing on the first rank; all learn of its failure."""

    def guarded() -> None:
        with written(path):
            work()

    distributed.first_decides(guarded, ranks)


def write_manifest(path: Path, step: int, facts: dict[str, Any]) -> None:
    """Write the JSON file that makes a checkpoint exist."""
    text = json.dumps({"format": FORMAT, "version": VERSION, "step": step, **facts}, indent=1)
    write_whole(path.with_suffix(".json"), lambda temporary: temporary.write_text(text))


def drop(path: Path) -> None:
    """Remove a checkpoint. The manifest goes first: a checkpoint without one does not exist."""
    path.with_suffix(".json").unlink(missing_ok=True)
    remove(path)


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` write a file under a temporary name, then give it its own."""
    with whole(path) as temporary:
        write(temporary)


def steps(directory: Path) -> list[Path]:
    """Return the checkpoints that claim to exist, oldest first."""
    found = []
    for manifest in sorted(directory.glob("step-*.json")):
        sharded = manifest.with_suffix(".dcp")
        found.append(sharded if sharded.is_dir() else manifest.with_suffix(".pt"))
    return found


def load(path: Path, *, verified: bool = False, whole: bool = True) -> Loaded:
    """Load one checkpoint to CPU memory.

    Args:
        path: a file step-N.pt or a directory step-N.dcp.
        verified: its files have been compared with their digests already.
        whole: False leaves out the tensors of a sharded one; see `with_shards`.

    Raises:
        UserError: missing, truncated, damaged, or not a checkpoint of this suite.
    """
    sharded = path.is_dir() and (path / REST).is_file()
    if not sharded and not path.is_file():
        raise UserError(f"{path}: no such checkpoint; expected a file step-N.pt of a run directory")
    if not verified:
        verify(path)
    try:
        content = torch.load(path / REST if sharded else path, map_location="cpu", weights_only=True)
        if whole and sharded and isinstance(content, dict) and content.get("version") == VERSION:
            content = shards.put_together(content, shards.read(path))
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


def with_shards(loaded: Loaded, place: shards.Place | None = None) -> Loaded:
    """Return a checkpoint with its tensors, if they are sharded and were left out; on all ranks at once.

    Args:
        place: see `shards.read`.

    Raises:
        UserError: they cannot be read.
    """
    if "aliases" not in loaded.content:
        return loaded
    try:
        content = shards.put_together(dict(loaded.content), shards.read(loaded.path, place))
    except (OSError, RuntimeError, KeyError, pickle.UnpicklingError, CheckpointException) as error:
        raise UserError(
            f"{loaded.path}: its shards cannot be read ({type(error).__name__}); use another"
        ) from error
    return Loaded(loaded.path, content)


def verify(path: Path) -> None:
    """Compare a checkpoint's files with the manifest, where there is one.

    Raises:
        UserError: a file that is missing, truncated or damaged.
    """
    manifest = read_manifest(path.with_suffix(".json"))
    if manifest is None:
        return
    files = {path / name: facts for name, facts in manifest.get("files", {}).items()} or {path: manifest}
    for file, facts in files.items():
        if not file.is_file():
            raise UserError(f"{file}: missing, its manifest names it; use another checkpoint")
        size = file.stat().st_size
        if size != facts["bytes"]:
            raise UserError(
                f"{file}: truncated or changed, {size} bytes instead of {facts['bytes']}; use another"
            )
        if sha256(file) != facts["sha256"]:
            raise UserError(f"{file}: damaged, its sha256 is not the one it was written with; use another")


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


def load_latest(
    directory: Path, config_hash: str, warn: Callable[[str], None], ranks: Ranks = ALONE
) -> Loaded | None:
    """Return the newest good checkpoint of this very run, None where there is none at all.

    A damaged one is named through `warn` and the one before it is used. Over several ranks the first chooses;
    of a sharded checkpoint they get all but the shards (`with_shards`).

    Raises:
        UserError: there are checkpoints, and not one of them can be used.
    """
    chosen: dict[str, Loaded] = {}

    def choose() -> str | None:
        problems = []
        for path in reversed(steps(directory)):
            try:
                loaded = load(path, whole=ranks.world_size == 1)
                found = loaded.content.get("config_hash")
                if found != config_hash:
                    raise UserError(f"{path}: belongs to another config ({found}, this run is {config_hash})")
            except UserError as error:
                problems.append(str(error))
                warn(f"{error}; trying the checkpoint before it")
                continue
            chosen[str(path)] = loaded
            return str(path)
        if problems:
            raise UserError(f"no usable checkpoint in {directory}: {problems[0]}; add --fresh to start over")
        return None

    path = distributed.first_decides(choose, ranks)
    if path is None:
        return None
    return chosen.get(path) or load(Path(path), verified=True, whole=False)


def resolve(where: str) -> Path:
    """Return the checkpoint a user means: one of its own, or the newest of a run directory."""
    path = Path(where)
    if path.is_dir() and not (path / REST).is_file():
        found = steps(path / "checkpoints") or steps(path)
        if not found:
            raise UserError(f"{path}: no checkpoint there; expected a run directory or a file step-N.pt")
        return found[-1]
    return path
