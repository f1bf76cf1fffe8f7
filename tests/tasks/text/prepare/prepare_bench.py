"""Seeded documents, sources made of them, and jobs that run in this process."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tasks.runner.progress import Silent
from tasks.text.prepare.job import Settings, prepare
from tasks.text.prepare.plan import Reading
from tasks.text.prepare.worker import Worker

ALPHABET = "abc xyz,.\n'\t 0129\"\\é漢🙂ß"


def make_documents(count: int, seed: int = 0) -> list[str]:
    """Return documents of a few to some hundred characters, none blank, many scripts."""
    draw = random.Random(seed)
    return [f"{i} " + "".join(draw.choices(ALPHABET, k=draw.randrange(400))) for i in range(count)]


def write_json_lines(path: Path, documents: list[str]) -> Path:
    """Write documents as JSON lines, with another column beside."""
    lines = [json.dumps({"id": i, "text": text}, ensure_ascii=i % 2 == 0) for i, text in enumerate(documents)]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


class InlinePool:
    """The pool's work in this process: no start-up time, and a test can stop it anywhere."""

    def __init__(self, request: dict[str, Any], workers: int) -> None:
        self.worker = Worker(json.loads(json.dumps(request)))

    def __enter__(self) -> "InlinePool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.worker.reader.close()

    def answers(self, requests, count: int) -> Iterator[tuple[int, Any]]:
        for number, request in requests:
            yield number, json.loads(json.dumps(self.worker.answer(request)))


@dataclass
class Bench:
    """Prepares small sets of bytes below one directory."""

    root: Path

    def settings(self, *sources: Path | str, **changes: Any) -> Settings:
        reading = {"unit_bytes": 4000, **changes.pop("reading", {})}
        values = {"tokenizer": "bytes", "held_out": 0.1, "shard_tokens": 7000, **changes}
        return Settings(tuple(map(str, sources)), reading=Reading(**reading), **values)

    def prepare(self, name: str, *sources: Path | str, **changes: Any) -> dict[str, Any]:
        fresh = changes.pop("fresh", False)
        return prepare(self.settings(*sources, **changes), self.root / name, Silent(), fresh=fresh)

    def shards(self, name: str) -> dict[str, bytes]:
        """Return the bytes of all shards of a set, by file name."""
        return {path.name: path.read_bytes() for path in sorted((self.root / name).glob("*.bin"))}


def tokens_of(shards: dict[str, bytes], prefix: str) -> np.ndarray:
    """Return all tokens of a split, read without the code under test: 1,024 bytes of header, then uint16."""
    parts = [np.frombuffer(data[1024:], "<u2") for name, data in shards.items() if name.startswith(prefix)]
    return np.concatenate(parts) if parts else np.empty(0, "<u2")


def texts_of(shards: dict[str, bytes], prefix: str) -> list[str]:
    """Return the documents of a split of a set of bytes: what lies between its end-of-text tokens."""
    tokens = tokens_of(shards, prefix)
    starts = np.flatnonzero(tokens == 256)
    assert len(tokens) == 0 or starts[0] == 0
    bounds = [*starts.tolist(), len(tokens)]
    return [bytes(tokens[i + 1 : j].astype(np.uint8)).decode("utf-8") for i, j in pairwise(bounds)]
