"""Webdataset shards on a local disk, read by number.

A shard is a tar file; neighbouring members that share the path up to the first dot of the file name are one
sample, and what follows the dot says what each member is (webdataset's rule, whose own function decides it
here). Headers are read once; after that any sample costs one read at a known place, so the order of a whole
epoch can be a true permutation, exactly restartable, which a shuffle buffer over a stream is not.
"""

import hashlib
import os
import tarfile
from dataclasses import dataclass
from pathlib import Path

from webdataset.tariterators import base_plus_ext

from tasks.errors import UserError

WHOLE_BYTES = 512 << 20  # sets up to this size are fingerprinted by all their bytes, larger ones by samples
EDGE_BYTES = 64 << 10


@dataclass(frozen=True)
class Member:
    """Where one file of a sample lies."""

    shard: int
    offset: int
    size: int


class Shards:
    """The samples of some shards, in order: `names` of samples, and `read(index)`.

    Args:
        paths: the shards.

    Raises:
        UserError: no shards, one that cannot be read or is cut short, or a key that comes twice.
    """

    def __init__(self, paths: list[Path]) -> None:
        if not paths:
            raise UserError("no shards were given; name .tar files or a pattern such as 'train-*.tar'")
        self.paths = paths
        self.names: list[str] = []
        self.members: list[dict[str, Member]] = []  # by extension
        for number, path in enumerate(paths):
            self._index(number, path)
        if not self.names:
            raise UserError(f"{paths[0]}: no samples in {len(paths)} shards; expected files named KEY.EXT")
        self.fingerprint = self._fingerprint()
        self._handles: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.names)

    def read(self, index: int) -> dict[str, bytes]:
        """Return the files of sample `index` by extension. Raises OSError."""
        return {extension: self._bytes(member) for extension, member in self.members[index].items()}

    def _bytes(self, member: Member) -> bytes:
        handle = self._handles.get(member.shard)
        if handle is None:
            handle = self._handles[member.shard] = os.open(self.paths[member.shard], os.O_RDONLY)
        return os.pread(handle, member.size, member.offset)

    def _index(self, number: int, path: Path) -> None:
        seen: set[str] = set()
        try:
            with tarfile.open(path, "r:") as archive:
                for entry in archive:
                    key, extension = base_plus_ext(entry.name) if entry.isfile() else (None, None)
                    if key is None or extension is None:
                        continue  # webdataset skips what is no file or has no extension
                    if not self.names or self.names[-1] != f"{path.name}:{key}":
                        if key in seen:
                            raise UserError(
                                f"{path}: the files of sample {key} are not neighbours; repack it"
                            )
                        seen.add(key)
                        self.names.append(f"{path.name}:{key}")
                        self.members.append({})
                    found = Member(number, entry.offset_data, entry.size)
                    self.members[-1][extension.lower()] = found
        except (OSError, tarfile.TarError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UserError(f"{path}: not a whole tar file ({reason}); fetch or pack it again") from error

    def _fingerprint(self) -> str:
        sizes = [path.stat().st_size for path in self.paths]
        digest = hashlib.sha256(repr((self.names, sizes)).encode())
        for path, size in zip(self.paths, sizes, strict=True):
            with path.open("rb") as stream:
                if sum(sizes) <= WHOLE_BYTES:
                    digest.update(hashlib.file_digest(stream, "sha256").digest())
                    continue
                digest.update(stream.read(EDGE_BYTES))
                stream.seek(max(0, size - EDGE_BYTES))
                digest.update(stream.read(EDGE_BYTES))
        return digest.hexdigest()

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_handles": {}}

    def __del__(self) -> None:
        for handle in getattr(self, "_handles", {}).values():
            os.close(handle)


def find_shards(directory: str | Path, pattern: str) -> list[Path]:
    """Return the files of a directory that match a pattern, in order of their names.

    Raises UserError where there is none.
    """
    root = Path(directory).expanduser()
    found = sorted(root.glob(pattern)) if root.is_dir() else []
    if not found:
        raise UserError(f"{root}: no shards named {pattern}; give a directory that has some, data.path=DIR")
    return found
