"""What a sweep does about one cell: its jobs, each a command in a process of its own that keeps a record.

A process each, because a crash, a full memory or a wrong kernel must not end the sweep.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from results.eval_record import EvalRecord
from results.record import BenchRecord, RunRecord
from results.store import load_records, read_record
from tasks.errors import UserError
from tasks.runner.config.schema import RunConfig
from tasks.runner.paths import ROOT, under_root
from tasks.runner.suite import Cell
from tasks.runner.sweep_slots import Slot

RUN_LOCK = ".lock"  # held by the run itself (training.py)
SWEEP_LOCK = ".sweep.lock"  # held by the sweep, from its look at the records to the end of the cell's jobs
LOG = "sweep.log"
TAIL_BYTES = 4096  # of a metrics file, many points
EVALUATION = "paper8"
NONE: Mapping[str, Sequence[str]] = MappingProxyType({})


@dataclass(frozen=True)
class Job:
    """One command, and whether what it should leave behind is there."""

    name: str
    words: tuple[str, ...]
    done: Callable[[], bool]


@dataclass(frozen=True)
class Work:
    """A cell as a sweep sees it: what to run, where it writes, and the run it is (None for a command)."""

    label: str
    jobs: tuple[Job, ...]
    directory: Path
    config: RunConfig | None = None
    cell: Cell | None = None

    def record(self) -> RunRecord | None:
        """Return the record of the cell's run, whatever its status, None where there is none."""
        return run_record(self.config) if self.config is not None else None

    def is_done(self) -> bool:
        """Tell whether every job has left its record."""
        return all(job.done() for job in self.jobs)


def run_record(config: RunConfig) -> RunRecord | None:
    """Return the record of this very config, None where there is none.

    Raises:
        UserError: a file of that name is not a record.
    """
    path = under_root(config.output.records) / f"{config.run_id()}.json"
    if not path.exists():
        return None
    try:
        record = read_record(path)
    except ValueError as error:
        raise UserError(str(error)) from error
    same = isinstance(record, RunRecord) and record.config_hash == config.config_hash()
    return record if same else None


def work_of_cell(cell: Cell, then: Sequence[str] = (), more: Mapping[str, Sequence[str]] = NONE) -> Work:
    """Return the work of one run and what follows it; `more` are options of what follows, by its name."""
    config = cell.config
    directory = under_root(config.output.runs) / config.run_id()

    def trained() -> bool:
        record = run_record(config)
        return record is not None and record.status == "completed"

    jobs = [Job("run", (*cell.arguments, "output.progress=plain"), trained)]
    jobs += [FOLLOW_UPS[name](config, directory, more.get(name, ())) for name in then]
    return Work(cell.label, tuple(jobs), directory, config, cell)


def work_of_command(command: str, records: str, runs: str) -> Work:
    """Return the work of a command such as `bench attention`, done when its record is there."""
    words = shlex.split(command)
    device = words[words.index("--device") + 1] if "--device" in words else "cpu"

    def done() -> bool:
        return any(
            isinstance(record, BenchRecord)
            and record.name == words[1]
            and record.environment.device.partition(":")[0] == device.partition(":")[0]
            for record in known_records(records)
        )

    name = re.sub(r"[^a-z0-9]+", "-", command.lower()).strip("-")
    job = Job(words[0], (*words, "--records", str(under_root(records))), done)
    return Work(command, (job,), under_root(runs) / f"sweep-{name}")


def known_records(directory: str) -> list[Any]:
    """Return all records of a directory, none where it does not exist yet."""
    path = under_root(directory)
    if not path.is_dir():
        return []
    try:
        return load_records(path)
    except ValueError as error:
        raise UserError(str(error)) from error


def probe_job(config: RunConfig, directory: Path, more: Sequence[str] = ()) -> Job:
    """Return the job that keeps the statistics of Figure 1 of the trained model."""
    records = str(under_root(config.output.records))

    def done() -> bool:
        return (Path(records) / f"{probe_run_id(config)}.json").exists()

    return Job("probe", ("probe", str(directory), "--records", records, *more), done)


def probe_run_id(config: RunConfig) -> str:
    """Return the name of the record of a run's probe."""
    return f"probe-{config.run_id()}"


def eval_job(config: RunConfig, directory: Path, more: Sequence[str] = ()) -> Job:
    """Return the job that evaluates the trained model downstream; `more` are options of ./xsa eval."""
    records = str(under_root(config.output.records))
    limit = int(more[list(more).index("--limit") + 1]) if "--limit" in more else None

    def done() -> bool:
        # By the names of their files first: reading every record for every cell takes long.
        for path in Path(records).glob(f"eval-*{config.run_id()}*.json"):
            record = read_record(path)
            same = isinstance(record, EvalRecord) and record.checkpoint.config_hash == config.config_hash()
            if same and record.limit == limit:  # a look at a few documents is not the evaluation
                return True
        return False

    words = ("eval", str(directory), "--tasks", EVALUATION, "--records", records, *more)
    return Job("eval", words, done)


FOLLOW_UPS: dict[str, Callable[..., Job]] = {"probe": probe_job, "eval": eval_job}


def is_held(path: Path) -> bool:
    """Tell whether another process holds a lock file."""
    if not path.exists():
        return False
    try:
        with FileLock(path, timeout=0):
            return False
    except Timeout:
        return True


def start(job: Job, directory: Path, slot: Slot) -> subprocess.Popen:
    """Start a job in its slot; what it prints is added to the cell's log."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    cores = ",".join(map(str, slot.cores)) or "-"
    command = [sys.executable, "-m", "tasks.runner.sweep_child", str(os.getpid()), cores, *job.words]
    with (directory / LOG).open("ab") as log:
        # A session of its own: Ctrl-C reaches it once, from the sweep, and not from the terminal as well.
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **slot.environment, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,
        )


class Position(NamedTuple):
    """How far a run is: its last training point."""

    step: int = 0
    loss: float | None = None
    rate: float | None = None  # units of its task a second


def position(directory: Path) -> Position:
    """Return the last training point that a run has written, step 0 before the first."""
    try:
        with (directory / "metrics.jsonl").open("rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(0, stream.tell() - TAIL_BYTES))
            tail = stream.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return Position()
    for text in reversed(tail):  # the last may be cut short, and so may the first
        try:
            line = json.loads(text)
            if line["kind"] == "train":
                return Position(line["step"], line.get("loss"), line.get("tokens_per_second"))
        except (ValueError, KeyError, TypeError):
            continue
    return Position()


def why(directory: Path, start: int, status: int) -> str:
    """Return in one line why a job ended with `status`, from what it wrote to its log after byte `start`."""
    text = (directory / LOG).read_bytes()[start:].decode("utf-8", errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = [line.partition("error: ")[2] for line in lines if line.startswith("xsa: error: ")]
    if told:
        return told[-1]
    if status < 0:
        name = signal.Signals(-status).name
        memory = "; the system does that where memory runs out" if -status == signal.SIGKILL else ""
        return f"killed by {name}{memory}"
    return lines[-1][:300] if lines else f"ended with status {status} and no message"


def record_failure(config: RunConfig, directory: Path, reason: str) -> None:
    """Keep the record of a run that failed without one: it crashed, or its data are not there."""
    from tasks.runner import recording
    from tasks.runner.device import choose_device
    from tasks.runner.trace import Trace

    loop = config.loop.model_copy(update={"device": "cpu"})
    device = choose_device(loop)
    record = recording.new_record(config, recording.environment(device, None, config.loop.compile))
    directory.mkdir(parents=True, exist_ok=True)
    failed = recording.filled(record, Trace(), None, status="failed", reason=reason)
    recording.keep(failed, directory, under_root(config.output.records))
