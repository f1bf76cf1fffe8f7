"""Preparing text: the suite's way against nanoGPT's, on the same text with as many processes.

nanoGPT's way is `datasets.map` with tiktoken, then one pass over the result into a `.bin` file. It is given
the text as an Arrow table already, which is not counted; the suite starts from the Parquet file.
"""

import functools
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from tasks.bench.timing import Timing, interleave, median_interval
from tasks.text.prepare.display import Quiet
from tasks.text.prepare.job import Settings, prepare
from tasks.text.prepare.tokenizers import GPT2

BASELINE = "nanoGPT"
BATCHES = 1024  # of nanoGPT's pass that writes the file
MEAN_LOG_BYTES, SPREAD = 7.6, 1.0  # a log-normal of lengths: about 3 kB on average, as web documents have
SHORTEST, LONGEST = 100, 60_000  # bytes


def documents(text: bytes, size: int, seed: int = 0) -> Iterator[str]:
    """Yield documents cut out of `text` at random, about `size` bytes in all."""
    draw = random.Random(seed)
    while size > 0:
        length = min(max(int(draw.lognormvariate(MEAN_LOG_BYTES, SPREAD)), SHORTEST), LONGEST, len(text))
        start = draw.randrange(len(text) - length + 1)
        yield text[start : start + length].decode("utf-8", errors="ignore")
        size -= length


def write_source(path: Path, text: bytes, size: int) -> int:
    """Write about `size` bytes of documents as Parquet in row groups of 1,000; return the bytes of text."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    found = list(documents(text, size))
    pq.write_table(pa.table({"text": found}), path, row_group_size=1000)
    return sum(len(document.encode("utf-8")) for document in found)


@functools.cache
def _encoding() -> Any:
    return GPT2()._encoding


def _tokenize(example: dict[str, str]) -> dict[str, Any]:
    ids = _encoding().encode_ordinary(example["text"])
    ids.append(_encoding().eot_token)
    return {"ids": ids, "len": len(ids)}


class NanoGPT:
    """The peer: `datasets.map`, then a memory-mapped file filled batch by batch."""

    def __init__(self, source: Path, directory: Path, workers: int) -> None:
        """Load the text as an Arrow table in `directory`."""
        import datasets

        datasets.disable_progress_bars()
        _encoding()  # built before the clock runs, and inherited by the processes of `map`
        self.out, self.workers, self.map_seconds = directory / "nanogpt.bin", workers, []
        self.cache = directory / "map"
        self.cache.mkdir()
        self.rows = datasets.load_dataset(
            "parquet", data_files=str(source), cache_dir=str(directory / "arrow"), split="train"
        )

    def __call__(self) -> None:
        """Do it once, from scratch."""
        started = time.perf_counter()
        number = len(self.map_seconds)  # a name of its own: nothing is taken from an earlier round
        tokens = self.rows.map(
            _tokenize,
            remove_columns=["text"],
            num_proc=self.workers,
            load_from_cache_file=False,
            cache_file_name=str(self.cache / f"{number}.arrow"),
            new_fingerprint=f"round{number}",
        )
        self.map_seconds.append(time.perf_counter() - started)
        length = int(np.sum(tokens["len"], dtype=np.uint64))
        file = np.memmap(self.out, dtype=np.uint16, mode="w+", shape=(length,))
        place, batches = 0, min(BATCHES, len(tokens))
        for index in range(batches):
            batch = tokens.shard(num_shards=batches, index=index, contiguous=True).with_format("numpy")
            ids = np.concatenate(batch["ids"])
            file[place : place + len(ids)] = ids
            place += len(ids)
        file.flush()
        for path in self.cache.iterdir():
            path.unlink()


class Suite:
    """`./xsa data prepare`, from the Parquet file to shards with their manifest."""

    def __init__(self, source: Path, directory: Path, workers: int) -> None:
        self.out = directory / "shards"
        self.settings = Settings((str(source),), held_out=0.0, workers=workers)

    def __call__(self) -> None:
        """Do it once, from scratch."""
        prepare(self.settings, self.out, Quiet(), fresh=True)


def same_tokens(nanogpt: Path, shards: Path) -> bool:
    """Tell whether both wrote the same; nanoGPT ends a document with the token that begins ours."""
    theirs = np.fromfile(nanogpt, dtype="<u2")
    ours = np.concatenate([np.fromfile(path, "<u2", offset=1024) for path in sorted(shards.glob("*.bin"))])
    return len(ours) == len(theirs) and ours[0] == theirs[-1] and bool((ours[1:] == theirs[:-1]).all())


def measure(text: bytes, megabytes: int, workers: int, rounds: int) -> list[dict[str, Any]]:
    """Return a row per way: MB of text a second, and its ratio to nanoGPT's with a 95% interval.

    Raises RuntimeError where the two do not write the same tokens: then nothing can be compared.
    """
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        source = directory / "source.parquet"
        size = write_source(source, text, megabytes * 1_000_000)
        nanogpt, suite = NanoGPT(source, directory, workers), Suite(source, directory, workers)
        times = interleave(
            {BASELINE: nanogpt, "suite": suite}, rounds, BASELINE, torch.device("cpu"), warmup=1
        )
        if not same_tokens(nanogpt.out, suite.out):
            raise RuntimeError("nanoGPT's way and the suite wrote different tokens")
        mapped = nanogpt.map_seconds[-rounds:]
    base = times[BASELINE].seconds
    times["datasets.map alone"] = Timing(mapped, [own / all_ for own, all_ in zip(mapped, base, strict=True)])
    return [_row(name, timing, size, workers, rounds) for name, timing in times.items()]


def _row(way: str, timing: Timing, size: int, workers: int, rounds: int) -> dict[str, Any]:
    """Return one row; a ratio of speeds is the inverse of one of times."""
    speeds = [1 / ratio for ratio in timing.ratios]
    low, high = median_interval(speeds)
    return {
        "way": way,
        "megabytes": size / 1e6,
        "workers": workers,
        "megabytes_per_second": size / 1e6 / timing.median_seconds,
        "speed_ratio": median(speeds),
        "ratio_low": low,
        "ratio_high": high,
        "rounds": rounds,
    }
