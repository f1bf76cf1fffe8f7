"""A job from its settings to the manifest: scan, tokenize in workers, merge, resume.

The same command goes on where a killed one stopped. Everything is kept in the output directory itself.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tasks.errors import UserError
from tasks.text.files import exclusive, write_whole
from tasks.text.prepare import manifest as manifests
from tasks.text.prepare.display import Display
from tasks.text.prepare.errors import disk, worker_errors
from tasks.text.prepare.parts import WORK, Counts, read_counts
from tasks.text.prepare.plan import Piece, Reading, Scan, unit_bytes, units
from tasks.text.prepare.pool import Pool
from tasks.text.prepare.sources import Source, find_source
from tasks.text.prepare.tokenizers import make_tokenizer
from tasks.text.prepare.writer import PREFIXES, Merger

JOB = "job.json"
MB = 1_000_000
HELD_OUT = 0.0005  # of the documents (paper, section 4)
SHARD_TOKENS = 100_000_000


@dataclass(frozen=True)
class Settings:
    """What a set is made of and how. All but `workers` and `vocabulary` decide the shards' bytes."""

    sources: tuple[str, ...]
    revision: str | None = None
    tokenizer: str = "gpt2"
    vocabulary: str | None = None
    held_out: float = HELD_OUT
    shard_tokens: int = SHARD_TOKENS
    reading: Reading = field(default_factory=Reading)
    skip_corrupt: bool = False
    workers: int = 1

    def check(self) -> None:
        """Raise UserError for a value out of range."""
        if not 0 <= self.held_out < 1:
            raise UserError(f"--held-out: {self.held_out}, expected at least 0 and less than 1")
        for name, value in (
            ("--shard-tokens", self.shard_tokens),
            ("--workers", self.workers),
            ("--max-document", self.reading.limit),
        ):
            if value < 1:
                raise UserError(f"{name}: {value}, expected at least 1")

    def describe(self) -> dict[str, Any]:
        """Return what a manifest says of the settings."""
        return {
            "held_out": self.held_out,
            "shard_tokens": self.shard_tokens,
            "column": self.reading.column,
            "documents": self.reading.documents,
            "max_document": self.reading.limit,
            "skip_corrupt": self.skip_corrupt,
        }


def prepare(settings: Settings, directory: Path, display: Display, *, fresh: bool = False) -> dict[str, Any]:
    """Prepare a set in `directory`, or go on with it, and return its manifest.

    A finished set of the same settings is returned as it is. `fresh` removes what an earlier job left there.
    Raises UserError for wrong settings, a source that cannot be read, a full disk, a directory in other use.
    """
    settings.check()
    source = find_source(settings.sources, settings.revision)
    with disk(directory):
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK):
            raise PermissionError(errno.EACCES, "cannot be written to")
    waiting = f"waiting for another process that prepares {directory}"
    with exclusive(directory / ".lock", lambda: display.note(waiting)), disk(directory):
        if fresh:
            _clear(directory)
        job = Job(settings, source, directory, display)
        return job.finished() or job.run()


class Job:
    """One job in its directory, which the caller has locked."""

    def __init__(self, settings: Settings, source: Source, directory: Path, display: Display) -> None:
        self.settings, self.source = settings, source
        self.directory, self.work, self.display = directory, directory / WORK, display
        self.tokenizer = make_tokenizer(settings.tokenizer, settings.vocabulary)
        plain = [settings.describe(), self.tokenizer.identity, source.describe()]
        # By name, not by path: a set may go on after its sources have moved.
        plain.append([asdict(replace(file, path="")) for file in source.files])
        self.identity = hashlib.sha256(json.dumps(plain, sort_keys=True).encode("utf-8")).hexdigest()

    def finished(self) -> dict[str, Any] | None:
        """Return the manifest if this job is done. Raises UserError if the directory holds something else."""
        found = manifests.read(self.directory)
        if found is not None:
            if found["source"].get("job") != self.identity:
                raise UserError(
                    f"{self.directory}: holds a set of other sources or settings; "
                    "give another --out, or --fresh to replace it"
                )
            shutil.rmtree(self.work, ignore_errors=True)
            return found
        if not self.work.exists() and (others := sorted(self.directory.glob("*.bin"))):
            raise UserError(
                f"{self.directory}: holds {others[0].name} and no manifest; give an empty directory as --out"
            )
        return None

    def run(self) -> dict[str, Any]:
        """Do what is left of the job and return the manifest."""
        self.work.mkdir(exist_ok=True)
        for path in [*self.work.glob(".*.tmp"), *self.directory.glob(".*.tmp")]:
            path.unlink(missing_ok=True)  # of a writer that was killed
        size = self._begin()
        with worker_errors(self.directory), Pool(self._request(size), self.settings.workers) as pool:
            scans = self._scan(pool)
            plan = units(scans, size)
            merger = Merger(self.directory, self.settings.shard_tokens)
            counts = self._tokenize(pool, plan, merger)
            merger.finish()
        if not sum(counts.documents.values()):
            reasons = ", ".join(f"{reason} {number}" for reason, number in counts.skipped.items())
            raise UserError(
                f"no document in the source ({reasons or 'it is empty'}); check the files and --column"
            )
        corrupt = self._corrupt(scans)
        source = self.source.describe() | {
            "job": self.identity,
            "files": [{"name": file.name, "bytes": file.size} for file in self.source.files],
        }
        result = manifests.build(
            self.settings.describe(), source, self.tokenizer, counts, merger.manifest(), corrupt
        )
        manifests.write(self.directory, result)
        shutil.rmtree(self.work, ignore_errors=True)
        return result

    def _begin(self) -> int:
        """Write what this job is, or check that it is the one that stopped; return the size of its units."""
        path = self.work / JOB
        try:
            begun = json.loads(path.read_bytes())
            if begun["identity"] != self.identity and not any(self.work.glob("????????.json")):
                shutil.rmtree(self.work)  # no work was done: a wrong setting was noticed first
                self.work.mkdir()
                raise FileNotFoundError
        except FileNotFoundError:
            size = self.settings.reading.unit_bytes or unit_bytes(self.source)
            begun = {"identity": self.identity, "unit_bytes": size}
            write_whole(path, [json.dumps(begun).encode("utf-8")])
        if begun["identity"] != self.identity:
            raise UserError(
                f"{self.directory}: an unfinished set of other settings, or its sources have changed; "
                "use the same ones, another --out, or --fresh to start over"
            )
        return begun["unit_bytes"]

    def _request(self, size: int) -> dict[str, Any]:
        """Return what every worker is told first."""
        return {
            "source": asdict(self.source),
            "reading": asdict(replace(self.settings.reading, unit_bytes=size)),
            "tokenizer": self.settings.tokenizer,
            "vocabulary": self.settings.vocabulary,
            "held_out": self.settings.held_out,
            "skip_corrupt": self.settings.skip_corrupt,
            "directory": str(self.work.resolve()),
        }

    def _scan(self, pool: Pool) -> list[Scan]:
        """Return what is in every file; what is known already is not looked at again."""
        paths = [self.work / f"{number:08d}.scan" for number in range(len(self.source.files))]
        todo = [number for number, path in enumerate(paths) if not path.exists()]
        self.display.begin("looking at files", len(paths), len(paths) - len(todo), "files")
        requests = ((number, {"scan": number}) for number in todo)
        for done, (number, answer) in enumerate(
            pool.answers(requests, len(todo)), 1 + len(paths) - len(todo)
        ):
            write_whole(paths[number], [json.dumps(answer).encode("utf-8")])
            self.display.advance(done)
        self.display.end()
        scans = [Scan.from_json(json.loads(path.read_bytes())) for path in paths]
        if not self.settings.skip_corrupt and (bad := self._corrupt(scans)):
            raise UserError(f"{bad[0]}; replace the file, leave it out, or count it with --skip-corrupt")
        return scans

    def _corrupt(self, scans: list[Scan]) -> list[str]:
        result = []
        for file, found in zip(self.source.files, scans, strict=True):
            if found.corrupt is not None:
                start = found.pieces[-1].stop if found.pieces else 0
                where = "corrupt" if not found.pieces else f"corrupt in the text from byte {start} on"
                result.append(f"{file.name}: {where} ({found.corrupt})")
        return result

    def _tokenize(self, pool: Pool, plan: list[list[Piece]], merger: Merger) -> Counts:
        """Write the parts of all units and merge them; return the counts of all."""
        ready = {
            unit: counts
            for unit in range(len(plan))
            if (counts := read_counts(self.work, unit, merger.needed(unit))) is not None
        }
        sizes = [sum(piece.size for piece in pieces) for pieces in plan]
        todo = [unit for unit in range(len(plan)) if unit not in ready]
        done = before = sum(sizes) - sum(sizes[unit] for unit in todo)
        self.display.begin("tokens", max(1, sum(sizes) // MB), done // MB, "MB")
        total, merged, started = Counts(), 0, time.monotonic()

        def merge() -> None:
            nonlocal merged
            while merged in ready:
                counts = ready.pop(merged)
                merger.feed(merged, counts)
                total.add(counts)
                merged += 1

        merge()
        requests = (
            (unit, {"unit": unit, "pieces": [list(asdict(piece).values()) for piece in plan[unit]]})
            for unit in todo
        )
        for unit, _ in pool.answers(requests, len(todo)):
            counts = read_counts(self.work, unit, merger.needed(unit))
            if counts is None:
                raise UserError(f"{self.work}: the parts of unit {unit} were removed or changed; start again")
            ready[unit] = counts
            merge()
            done += sizes[unit]
            spent = time.monotonic() - started
            self.display.advance(done // MB, rate=(done - before) / MB / spent)
        self.display.end()
        return total


def _clear(directory: Path) -> None:
    """Remove a set or what a job left, by the names of its files."""
    ours = re.compile(rf"({'|'.join(PREFIXES.values())})_\d{{6}}\.bin")
    (directory / manifests.MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(directory / WORK, ignore_errors=True)
    for path in directory.glob("*.bin"):
        if ours.fullmatch(path.name):
            path.unlink()
