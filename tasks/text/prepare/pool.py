"""Worker processes that answer requests, several at once; answers come in the order they are ready."""

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]  # what `import tasks` needs on its path

Request = dict[str, Any]


class WorkerError(Exception):
    """What went wrong in a worker, as `worker.describe` puts it."""

    def __init__(self, description: dict[str, Any]) -> None:
        super().__init__(description["message"])
        self.kind: str = description["kind"]
        self.number: int | None = description.get("number")
        self.trace: str = description.get("trace", "")


class Pool:
    """`workers` processes for one job. Use as a context: leaving it ends them."""

    def __init__(self, job: dict[str, Any], workers: int) -> None:
        """Start nothing yet. Raises ValueError for fewer than one worker."""
        if workers < 1:
            raise ValueError(f"expected at least one worker process, got {workers}")
        self.job, self.workers = job, workers
        self._processes: list[subprocess.Popen[str]] = []
        self._said: list[Any] = []

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        for said in self._said:
            said.close()

    def _start(self) -> subprocess.Popen[str]:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        said = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        # A group of its own: Ctrl-C reaches this process alone, which ends the workers.
        process = subprocess.Popen(
            [sys.executable, "-m", "tasks.text.prepare.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            encoding="utf-8",
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
            process_group=0,
        )
        self._processes.append(process)
        self._said.append(said)
        return process

    def answers(self, requests: Iterable[tuple[int, Request]], count: int) -> Iterator[tuple[int, Any]]:
        """Yield number and answer of every request, as they come; they start in the order given.

        Raises WorkerError for the first request that fails, and when a worker dies. To be called from one
        thread, once at a time.
        """
        todo = iter(requests)
        turn = threading.Lock()
        done: queue.SimpleQueue[tuple[int, Any] | BaseException] = queue.SimpleQueue()

        def drive(place: int) -> None:
            try:
                while True:
                    with turn:
                        item = next(todo, None)
                    if item is None:
                        return
                    done.put((item[0], self._ask(place, item[1])))
            except BaseException as error:  # raised again by the thread that waits
                done.put(error)

        while len(self._processes) < min(self.workers, count):
            process = self._start()
            assert process.stdin is not None
            process.stdin.write(json.dumps(self.job) + "\n")
        for place in range(min(self.workers, count)):
            threading.Thread(target=drive, args=(place,), daemon=True).start()
        for _ in range(count):
            result = done.get()
            if isinstance(result, BaseException):
                raise result
            yield result

    def _ask(self, place: int, request: Request) -> Any:
        process = self._processes[place]
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except (BrokenPipeError, ValueError):
            line = ""
        if not line:
            raise WorkerError({"kind": "died", "message": self._last_words(place)})
        result = json.loads(line)
        if "error" in result:
            raise WorkerError(result["error"])
        return result["answer"]

    def _last_words(self, place: int) -> str:
        status = self._processes[place].wait()
        self._said[place].seek(0)
        last = (self._said[place].read().strip().splitlines() or ["it said nothing"])[-1]
        return f"a worker process died (status {status}): {last}"
