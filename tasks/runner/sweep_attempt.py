"""One cell on its way to its end: the lock that makes it this sweep's, its slot, and the job that runs."""

import subprocess
import time
from collections.abc import Callable

from filelock import FileLock, Timeout

from tasks.errors import UserError
from tasks.runner import sweep_jobs
from tasks.runner.sweep_jobs import RUN_LOCK, SWEEP_LOCK, Job
from tasks.runner.sweep_rows import Row, State, state_of
from tasks.runner.sweep_slots import Slot

Start = Callable[..., subprocess.Popen]


class Attempt:
    """A cell that this sweep is at. Its row says how it goes, and how it ended."""

    def __init__(self, row: Row, slot: Slot, lock: FileLock, start: Start) -> None:
        self.row, self.slot, self.lock, self.start = row, slot, lock, start
        self.waiting = list(row.work.jobs)
        self.job: Job | None = None
        self.process: subprocess.Popen | None = None
        self.began = time.monotonic()
        self.first: tuple[int, float] | None = None  # the job's first step that was seen, and when

    def advance(self, stopping: bool) -> bool:
        """Look at the job, start the next where it has ended, and tell whether the cell is settled.

        When `stopping`, nothing more is started.
        """
        row = self.row
        try:
            if self.process is not None:
                status = self.process.poll()
                self._look()
                if status is None:
                    return False
                self._ended(status, stopping)
            if row.state is State.RUNNING:
                self._next(stopping)
        except (UserError, OSError) as error:  # a record that is none, a log that cannot be written
            if self.process is not None:
                raise
            row.state, row.detail = State.FAILED, str(error)
        if row.state is not State.RUNNING:
            row.left = None
            self.lock.release()
        return row.state is not State.RUNNING

    def tell(self, number: int) -> None:
        """Pass a signal on to the running job."""
        if self.process is not None:
            self.process.send_signal(number)

    def _next(self, stopping: bool) -> None:
        """Start the next job that is not done; without one the cell is done."""
        row = self.row
        while self.waiting:
            job = self.waiting.pop(0)
            if job.done():
                continue
            if stopping:
                row.state, row.detail = State.STOPPED, f"before its {job.name}"
                return
            directory = row.work.directory
            log = directory / sweep_jobs.LOG
            self.job, self.first = job, None
            self.before = row.work.record()
            self.log_start = log.stat().st_size if log.exists() else 0
            row.detail = "" if job.name == "run" else job.name
            self.process = self.start(job, directory, self.slot)
            return
        row.state, row.detail = State.DONE, ""

    def _look(self) -> None:
        """Let the row tell how far the job is; the time left is by this job's own steps."""
        row, now = self.row, time.monotonic()
        row.seconds = now - self.began
        seen = sweep_jobs.position(row.work.directory)
        row.step, row.loss, row.rate = seen.step, seen.loss, seen.rate
        if self.first is None or seen.step < self.first[0]:
            self.first = (seen.step, now)
        made = seen.step - self.first[0]
        row.left = (now - self.first[1]) / made * (row.total - seen.step) if made > 0 and row.total else None

    def _ended(self, status: int, stopping: bool) -> None:
        """Let the row say how the job ended; RUNNING means: go on."""
        row, job, self.process = self.row, self.job, None
        work = row.work
        if job.done():
            return
        after = work.record()
        fresh = after is not None and after != self.before
        if stopping or (fresh and after.status == "interrupted"):
            row.state = State.STOPPED
            row.detail = "its checkpoint is written" if fresh else "stopped"
        elif fresh and after.status == "failed":
            row.state, row.detail = State.FAILED, after.reason or ""
        elif status == 2 and sweep_jobs.is_held(work.directory / RUN_LOCK):
            row.state = State.ELSEWHERE
        else:
            self._failed_without_record(job, status)

    def _failed_without_record(self, job: Job, status: int) -> None:
        row, work = self.row, self.row.work
        row.state, row.detail = State.FAILED, sweep_jobs.why(work.directory, self.log_start, status)
        if job.name != "run" or work.config is None:
            row.detail = f"{job.name}: {row.detail}"
            return
        try:
            sweep_jobs.record_failure(work.config, work.directory, row.detail)
        except OSError as error:
            row.detail += f"; no record of it could be written ({error.strerror})"


def take(row: Row, slot: Slot, start: Start, retry_failed: bool) -> Attempt | None:
    """Take a cell that nobody is at and that has something to do; else the row says where it stands.

    Raises:
        UserError: its directory cannot be written.
    """
    work = row.work
    try:
        work.directory.mkdir(parents=True, exist_ok=True)
        lock = FileLock(work.directory / SWEEP_LOCK)
        lock.acquire(timeout=0)
    except Timeout:
        row.state = State.ELSEWHERE
        return None
    except OSError as error:
        raise UserError(f"{work.directory}: cannot be written ({error.strerror})") from error
    try:
        # Another sweep may have been here; what failed there is not tried again here.
        same = work.record() == row.before
        row.state, row.detail = state_of(work, retry_failed and same)
        if row.state is State.WAITING and sweep_jobs.is_held(work.directory / RUN_LOCK):
            row.state = State.ELSEWHERE
    except UserError as error:
        row.state, row.detail = State.FAILED, str(error)
    if row.state is not State.WAITING:
        lock.release()
        return None
    row.state = State.RUNNING
    return Attempt(row, slot, lock, start)
