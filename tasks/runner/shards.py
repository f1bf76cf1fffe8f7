"""Sharded tensors of a checkpoint in a directory (torch.distributed.checkpoint), written and read by any
number of processes.

Tensors have flat names, the path to them in the checkpoint's content: `optimizer/state/3/momentum_buffer`.
"""

import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.tensor import DTensor

Place = Callable[[str, torch.Size, torch.dtype], Tensor]
# The only names that the index of a checkpoint may call when it is read: it is a pickle, and a pickle may
# call anything.
INDEX_NAMES = re.compile(
    r"torch\.distributed\.checkpoint\.(metadata|filesystem)\.(Metadata|MetadataIndex|StorageMeta|"
    r"TensorStorageMetadata|BytesStorageMetadata|ChunkStorageMetadata|TensorProperties|_MEM_FORMAT_ENCODING|"
    r"_StorageInfo)|torch\.(Size|serialization\._get_layout|[a-z]+[0-9]*)|collections\.OrderedDict|"
    r"pathlib\.PosixPath"
)


class IndexUnpickler(pickle.Unpickler):
    """Reads the index of a checkpoint and refuses every other content."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class of the index's own kind."""
        if not INDEX_NAMES.fullmatch(f"{module}.{name}"):
            raise pickle.UnpicklingError(f"{module}.{name} has no place in the index of a checkpoint")
        found = super().find_class(module, name)
        if module == "torch" and not isinstance(found, torch.dtype | type):
            raise pickle.UnpicklingError(f"{module}.{name} has no place in the index of a checkpoint")
        return found


class Reader(dcp.FileSystemReader):
    """torch's reader, with an index that cannot run code."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index. Raises pickle.UnpicklingError for what is none."""
        with Path(self._get_metadata_path(kwargs.get("rank"))).open("rb") as file:
            index = IndexUnpickler(file).load()
        if not isinstance(index, Metadata):
            raise pickle.UnpicklingError("not the index of a checkpoint")
        index.storage_meta = index.storage_meta or StorageMeta()
        index.storage_meta.load_id = self.load_id
        return index


def has_shards(content: Any) -> bool:
    """Tell whether sharded tensors are in a checkpoint's content."""
    if isinstance(content, dict):
        return any(map(has_shards, content.values()))
    return isinstance(content, DTensor)


def taken_apart(content: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the sharded tensors by name, and the content without them.

    A tensor that occurs twice (tied weights) is kept once; `aliases` of the rest tells where else it belongs.
    """
    tensors: dict[str, Tensor] = {}
    seen: dict[int, str] = {}
    aliases: dict[str, str] = {}

    def walk(value: Any, path: tuple[str, ...]) -> Any:
        if not isinstance(value, dict):
            return value
        kept = {}
        for key, part in value.items():
            if not isinstance(part, DTensor):
                kept[key] = walk(part, (*path, str(key)))
                continue
            name, same = "/".join((*path, str(key))), part.to_local().untyped_storage().data_ptr()
            if same and same in seen:
                aliases[name] = seen[same]
            else:
                seen[same] = name
                tensors[name] = part
        return kept

    rest = walk(content, ())
    return tensors, {**rest, "aliases": aliases}


def put_together(rest: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Put tensors back where `taken_apart` took them from, in place; return the content."""
    aliases = rest.pop("aliases")
    for name, tensor in {**tensors, **{name: tensors[same] for name, same in aliases.items()}}.items():
        *path, last = name.split("/")
        place: Any = rest
        for part in path:
            key = int(part) if part.isdecimal() else part  # parameters are counted in an optimizer's state
            place = place.setdefault(key, {})
        place[last] = tensor
    return rest


def write(directory: Path, tensors: dict[str, Tensor]) -> None:
    """Write every rank's shards; on all ranks at once.

    Raises:
        OSError or dcp.api.CheckpointException: the disk is full or not writable on some rank; on all.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's, about its own use of storages
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(directory, sync_files=True))


def read(directory: Path, place: Place | None = None) -> dict[str, Tensor]:
    """Return the tensors of a directory.

    Args:
        place: returns the tensor (a shard, perhaps) to fill for a name, size and type, on all ranks at once;
            None reads whole tensors to CPU memory, each process for itself.
    """
    reader = Reader(directory)
    alone = place is None
    place = place or (lambda name, size, dtype: torch.empty(size, dtype=dtype))
    tensors = {
        name: place(name, entry.size, entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that there is one process
        dcp.load(tensors, storage_reader=Reader(directory), no_dist=alone)
    return tensors
