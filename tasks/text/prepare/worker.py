"""A worker process: reads requests as JSON lines, answers each with one, ends when its input does.

The first line is the job. Then `{"scan": N}` cuts file N into pieces and `{"unit": N, "pieces": [...]}`
writes a unit's parts. The end of input also comes when the process that started the worker is killed.
"""

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from tasks.errors import UserError
from tasks.text.prepare.documents import CorruptError
from tasks.text.prepare.parts import write_parts
from tasks.text.prepare.plan import Piece, PieceReader, Reading, scan
from tasks.text.prepare.sources import File, Source, hub_errors, with_patience
from tasks.text.prepare.tokenizers import make_tokenizer


class Worker:
    """What a worker needs to answer: the source, the tokenizer, where to write."""

    def __init__(self, job: dict[str, Any]) -> None:
        source = job["source"]
        self.source = Source(**source | {"files": tuple(File(**file) for file in source["files"])})
        self.reading = Reading(**job["reading"])
        self.reader = PieceReader(self.source, self.reading)
        self.tokenizer = make_tokenizer(job["tokenizer"], job["vocabulary"])
        self.directory = Path(job["directory"])
        self.fraction, self.skip_corrupt = job["held_out"], job["skip_corrupt"]

    def answer(self, request: dict[str, Any]) -> Any:
        """Do what a request asks; the network is given several chances."""
        if self.source.repo is None:
            return self._answer(request)
        with hub_errors(self.source.repo):
            return with_patience(lambda: self._answer(request))

    def _answer(self, request: dict[str, Any]) -> Any:
        if "scan" in request:
            return scan(self.source, request["scan"], self.reading).to_json()
        pieces = [Piece(*row) for row in request["pieces"]]
        try:
            write_parts(
                self.directory,
                request["unit"],
                pieces,
                self.reader,
                self.tokenizer,
                self.fraction,
                self.skip_corrupt,
            )
        except BaseException:
            self.reader.close()  # it may stand anywhere
            raise
        return {}


def describe(error: BaseException) -> dict[str, Any]:
    """Return an error as plain values: what kind, its message, and the system's number of it."""
    if isinstance(error, UserError):
        return {"kind": "user", "message": str(error)}
    if isinstance(error, CorruptError):
        return {"kind": "corrupt", "message": str(error)}
    if isinstance(error, OSError) and error.errno is not None:
        name = f" {error.filename}" if error.filename else ""
        return {"kind": "system", "number": error.errno, "message": f"{error.strerror}{name}"}
    last = traceback.format_exception_only(error)[-1].strip()
    return {"kind": "fault", "message": last, "trace": "".join(traceback.format_exception(error))}


def main() -> None:
    """Answer until the input ends."""
    # Answers have the pipe for themselves: whatever a library prints goes to standard error.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    worker: Worker | None = None
    for line in sys.stdin:
        try:
            request = json.loads(line)
            if worker is None:
                worker = Worker(request)
                continue
            result = {"answer": worker.answer(request)}
        except Exception as error:
            result = {"error": describe(error)}
        answers.write(json.dumps(result) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
