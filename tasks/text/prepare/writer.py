"""The merge: parts of units, in the order of the units, into shards of equal length.

After every shard the journal says which shards are complete and where in the parts the next one starts; only
then are the parts behind that place removed. So a kill at any moment leaves either the old or the new state,
and going on from it gives the same bytes.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tasks.errors import UserError
from tasks.text.files import write_whole
from tasks.text.prepare.parts import SPLITS, WORK, Counts, part
from tasks.text.shards import HEADER_BYTES, TOKEN, write_chunks

JOURNAL = "journal.json"
CHUNK_TOKENS = 1 << 22
PREFIXES = {"train": "train", "validation": "val"}


@dataclass
class Shard:
    """A shard that is complete."""

    file: str
    tokens: int
    sha256: str


@dataclass
class Line:
    """One split on its way: complete shards, and where the next begins."""

    shards: list[Shard] = field(default_factory=list)
    unit: int = 0
    offset: int = 0  # tokens of that unit which are in shards


def shard_name(split: str, number: int) -> str:
    """Return the file name of a shard."""
    return f"{PREFIXES[split]}_{number:06d}.bin"


class Merger:
    """Writes the shards of one job. Units are fed in order, from the first one whose parts are needed."""

    def __init__(self, directory: Path, shard_tokens: int) -> None:
        """Go on from the journal in `directory`, if there is one.

        Raises UserError where a shard that the journal names is not there in full, and OSError.
        """
        self.directory, self.work, self.shard_tokens = directory, directory / WORK, shard_tokens
        self.lines = {split: Line() for split in SPLITS}
        self._pending: dict[str, list[tuple[int, int, int]]] = {
            split: [] for split in SPLITS
        }  # unit, from, to
        try:
            data = json.loads((self.work / JOURNAL).read_bytes())
        except FileNotFoundError:
            return
        for split in SPLITS:
            row = data[split]
            self.lines[split] = Line([Shard(**shard) for shard in row["shards"]], row["unit"], row["offset"])
            for shard in self.lines[split].shards:
                self._check(shard)
        self._forget()

    def _check(self, shard: Shard) -> None:
        path = self.directory / shard.file
        expected = HEADER_BYTES + shard.tokens * TOKEN.itemsize
        if not path.is_file() or path.stat().st_size != expected:
            raise UserError(f"{path}: gone or damaged since it was written; start over with --fresh")

    def needed(self, unit: int) -> list[str]:
        """Return the splits that still need the parts of a unit."""
        return [split for split in SPLITS if unit >= self.lines[split].unit]

    def feed(self, unit: int, counts: Counts) -> None:
        """Take the next unit; write the shards that it completes. Raises OSError."""
        for split in self.needed(unit):
            line = self.lines[split]
            start = line.offset if unit == line.unit else 0
            self._pending[split].append((unit, start, counts.tokens[split]))
            while self._held(split) >= self.shard_tokens:
                self._write(split, self.shard_tokens)

    def finish(self) -> None:
        """Write what is left as the last shards. Raises OSError."""
        for split in SPLITS:
            if held := self._held(split):
                self._write(split, held)

    def _held(self, split: str) -> int:
        return sum(stop - start for _, start, stop in self._pending[split])

    def _write(self, split: str, count: int) -> None:
        taken, rest, missing = [], [], count
        for unit, start, stop in self._pending[split]:
            cut = min(stop, start + missing)
            missing -= cut - start
            if cut > start:
                taken.append((unit, start, cut))
            if cut < stop or not missing:
                rest.append((unit, cut, stop))
        line = self.lines[split]
        name = shard_name(split, len(line.shards))
        digest = write_chunks(self.directory / name, count, self._chunks(split, taken))
        line.shards.append(Shard(name, count, digest))
        line.unit, line.offset, _ = rest[0]
        self._pending[split] = rest
        text = json.dumps({split: asdict(line) for split, line in self.lines.items()})
        write_whole(self.work / JOURNAL, [text.encode("utf-8")])
        self._forget()

    def _chunks(self, split: str, pieces: list[tuple[int, int, int]]) -> Iterator[bytes]:
        for unit, start, stop in pieces:
            with part(self.work, unit, split).open("rb") as stream:
                stream.seek(start * TOKEN.itemsize)
                left = (stop - start) * TOKEN.itemsize
                while left:
                    chunk = stream.read(min(left, CHUNK_TOKENS * TOKEN.itemsize))
                    if not chunk:
                        raise OSError(f"{stream.name} ended early")
                    left -= len(chunk)
                    yield chunk

    def _forget(self) -> None:
        """Remove parts that are wholly in shards."""
        for split, line in self.lines.items():
            unit = line.unit - 1
            while unit >= 0 and (path := part(self.work, unit, split)).exists():
                path.unlink()
                unit -= 1

    def manifest(self) -> dict[str, list[dict[str, Any]]]:
        """Return the complete shards of every split, as a manifest has them."""
        return {
            split: [
                {
                    "file": shard.file,
                    "tokens": shard.tokens,
                    "bytes": HEADER_BYTES + shard.tokens * TOKEN.itemsize,
                    "sha256": shard.sha256,
                }
                for shard in line.shards
            ]
            for split, line in self.lines.items()
        }
