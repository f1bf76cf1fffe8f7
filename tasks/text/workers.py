"""Worker processes that read documentation: each answers one batch of files after another."""

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tasks.text import extract
from tasks.text.extract import Docstring

BATCH_BYTES = 400_000  # of source: about 0.2 s of work, small enough to keep all workers busy to the end

Answer = list[Docstring] | str  # a file's docstrings, or why it could not be read


def read_documentation(
    files: Sequence[Path], workers: int, progress: Callable[[float], None]
) -> list[Answer]:
    """Return the docstrings of every file, in order, read by `workers` processes.

    `progress` gets the fraction of source bytes read, from the calling thread. The answer does not depend on
    the number of workers. Raises RuntimeError when a worker dies, ValueError for fewer than one worker.
    """
    if workers < 1:
        raise ValueError(f"expected at least one worker process, got {workers}")
    sizes = [file.stat().st_size for file in files]
    batches = list(_batches(sizes))
    todo: queue.SimpleQueue[range] = queue.SimpleQueue()
    for batch in batches:
        todo.put(batch)
    done: queue.SimpleQueue[tuple[range, list[Answer]] | BaseException] = queue.SimpleQueue()
    answers: list[Answer] = [""] * len(files)
    total, read = max(sum(sizes), 1), 0
    processes = [_start() for _ in range(min(workers, len(batches)))]
    threads = [
        threading.Thread(target=_drive, args=(process, files, todo, done), daemon=True)
        for process in processes
    ]
    try:
        for thread in threads:
            thread.start()
        for _ in batches:
            result = done.get()
            if isinstance(result, BaseException):
                raise result
            batch, found = result
            answers[batch.start : batch.stop] = found
            read += sum(sizes[batch.start : batch.stop])
            progress(read / total)
    finally:
        for process in processes:
            process.kill()
        for thread in threads:
            thread.join()
        for process in processes:
            process.communicate()
    return answers


def _batches(sizes: Sequence[int]) -> Iterator[range]:
    start, held = 0, 0
    for stop, size in enumerate(sizes, 1):
        held += size
        if held >= BATCH_BYTES or stop == len(sizes):
            yield range(start, stop)
            start, held = stop, 0


def _start() -> subprocess.Popen[str]:
    # A session of its own: an interrupt from the keyboard reaches the builder alone, which ends the workers.
    return subprocess.Popen(
        [sys.executable, "-I", extract.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        start_new_session=True,
    )


def _drive(
    process: subprocess.Popen[str],
    files: Sequence[Path],
    todo: "queue.SimpleQueue[range]",
    done: "queue.SimpleQueue[tuple[range, list[Answer]] | BaseException]",
) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        while True:
            try:
                batch = todo.get_nowait()
            except queue.Empty:
                return
            names = [str(file) for file in files[batch.start : batch.stop]]
            process.stdin.write(json.dumps(names) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            if not line:
                last = (process.stderr.read().strip().splitlines() or ["no message"])[-1]
                raise RuntimeError(f"a worker reading {names[0]} and the files after it died: {last}")
            done.put((batch, json.loads(line)))
    except BaseException as error:  # handed to the builder's thread, which raises it
        done.put(error)
